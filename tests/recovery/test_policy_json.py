"""Policies as JSON: every field comes back, and what a person edited wrongly is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from patchkv_agents.errors import InputError
from patchkv_agents.recovery import RecoveryPolicy, WindowModel
from patchkv_agents.recovery.policy import BlendPolicy
from patchkv_agents.recovery.policy_json import policy_from_json, policy_to_json

POLICY = replace(
    RecoveryPolicy.default(),
    window_model=WindowModel(0.5, (0.1, 0.2, -0.3, 0.0, 0.0, 1e-3)),
    blend=BlendPolicy(),
)


@pytest.mark.parametrize("policy", [POLICY, RecoveryPolicy.exact(), RecoveryPolicy.published()])
def test_a_policy_comes_back(policy):
    assert policy_from_json(json.loads(json.dumps(policy_to_json(policy)))) == policy


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("window_tokens",), 1.5),
        (("block_size",), 16.0),
        (("tail_tokens",), True),
        (("tail_tokens",), None),
        (("selection",), "best"),
        (("precision",), 5),
        (("window_model", "coefficients"), [1.0]),
    ],
)
def test_wrong_values_are_refused(path, value):
    fields = policy_to_json(POLICY)
    where = fields
    for name in path[:-1]:
        where = where[name]
    where[path[-1]] = value
    with pytest.raises(InputError):
        policy_from_json(fields)
