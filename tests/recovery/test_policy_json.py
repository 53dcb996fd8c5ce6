"""Policies as JSON: every field comes back, and what a person edited wrongly is refused."""

from __future__ import annotations

import json

import pytest

from patchkv_agents.errors import InputError
from patchkv_agents.recovery import (
    Blocks,
    Combined,
    Contiguous,
    Edited,
    Question,
    RecoveryPolicy,
    Tokens,
    WindowModel,
)
from patchkv_agents.recovery.files import policy_from_json, policy_to_json
from patchkv_agents.recovery.named import method, method_names

POLICY = RecoveryPolicy.default().varied(
    window_model=WindowModel(0.5, (0.1, 0.2, -0.3, 0.0, 0.0, 1e-3)), rule=Blocks(0.03)
)
RULES = (Blocks, Tokens, Contiguous, Edited, Combined, Question)


@pytest.mark.parametrize(
    "policy",
    [
        POLICY,
        *(method(name).policy for name in method_names()),
        *(POLICY.varied(rule=rule(0.25)) for rule in RULES),
    ],
    ids=lambda policy: policy.name,
)
def test_a_policy_comes_back(policy):
    assert policy_from_json(json.loads(json.dumps(policy_to_json(policy)))) == policy


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("name",), 5, "kind"),
        (("method",), 5, "kind"),
        (("method", "kind"), "best", "use one of exact, direct_reuse, cacheblend, published"),
        (("method", "window_tokens"), 1.5, "window_tokens"),
        (("method", "block_size"), 16.0, "block_size"),
        (("method", "tail_tokens"), True, "tail_tokens"),
        (("method", "tail_tokens"), None, "tail_tokens"),
        (("method", "tail_tokens"), 0, "the last token is always needed"),
        (("method", "max_repaired"), "0.1", "max_repaired"),
        (("method", "stop"), None, "unknown fields .'stop'"),
        (("method", "rule"), "blocks", "rule"),
        (("method", "rule", "kind"), "best", "rule"),
        (("method", "rule", "fraction"), "3 %", "rule.Blocks.fraction"),
        (("method", "rule", "share"), 0.5, "unknown fields .'share'"),
        (("method", "window_model", "coefficients"), [1.0], "six|6 finite"),
        (("method", "window_model", "intercept"), None, "window_model.intercept"),
    ],
)
def test_wrong_values_are_refused(path, value, words):
    fields = policy_to_json(POLICY)
    where = fields
    for name in path[:-1]:
        where = where[name]
    where[path[-1]] = value
    with pytest.raises(InputError, match=words):
        policy_from_json(fields)


def test_a_missing_field_is_named():
    fields = policy_to_json(POLICY)
    del fields["method"]["window_tokens"]
    with pytest.raises(InputError, match="lacks 'window_tokens'"):
        policy_from_json(fields)
    with pytest.raises(InputError, match="'name' and 'method'"):
        policy_from_json({"name": "x"})
