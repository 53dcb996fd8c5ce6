"""What engines do with a profile: refuse another model's, and use only what has passed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from patchkv_agents.engine import Engine
from patchkv_agents.errors import ProfileError
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_agents.recovery.named import method, setup_named
from tests.engine.models import tiny_engine

from .profiles import POLICY, passed, profile_of


@pytest.fixture(scope="module")
def plain(smollm2_tokenizer) -> Engine:
    return tiny_engine(smollm2_tokenizer, 1024)


def engine_with(plain: Engine, profile, **options) -> Engine:
    return Engine(plain.adapter.model, plain.tokenizer, recovery_profile=profile, **options)


def test_a_profile_that_has_passed_is_used(plain, tmp_path: Path, caplog):
    profile = passed(profile_of(fingerprint=plain.fingerprint))
    file = tmp_path / "profile.json"
    profile.save(file)
    for given in (profile, file, str(file)):
        engine = engine_with(plain, given)
        assert engine.profile == profile and engine.policy == POLICY
        assert engine.storage == profile.storage
    assert plain.profile is None and plain.policy.is_exact
    assert not caplog.records


@pytest.mark.parametrize("reasons", [None, ("the median is 2 nats",)])
def test_one_that_has_not_passed_makes_recovery_exact_and_is_told_once(plain, caplog, reasons):
    profile = profile_of(fingerprint=plain.fingerprint)
    if reasons:
        profile = passed(profile, *reasons)
    with caplog.at_level(logging.WARNING):
        engine = engine_with(plain, profile)
        thread = engine.thread("t")
        for text in ("one", "two"):
            reply = thread.generate([{"role": "user", "content": text}], max_new_tokens=1)
    assert engine.policy.is_exact and reply.report.policy == "exact" and reply.report.is_exact
    assert engine.profile is profile
    assert len(caplog.records) == 1 and "patchkv validate" in caplog.text
    assert (reasons or ("not validated yet",))[0] in caplog.text


def test_a_policy_that_is_given_needs_no_pass(plain, caplog):
    profile = profile_of(fingerprint=plain.fingerprint)
    assert engine_with(plain, profile, policy=profile.policy).policy == POLICY
    assert engine_with(plain, passed(profile), policy=RecoveryPolicy.exact()).policy.is_exact
    assert not caplog.records


def test_another_models_profile_is_an_error(plain):
    with pytest.raises(ProfileError, match="patchkv profile"):
        engine_with(plain, passed(profile_of()))
    # Whatever policy is given: its numbers would be taken for this model's.
    with pytest.raises(ProfileError):
        engine_with(plain, profile_of(), policy=RecoveryPolicy.exact())


def test_a_profile_is_read_before_weights(tmp_path: Path):
    with pytest.raises(ProfileError, match="there is no profile"):
        Engine.from_pretrained("no-such-model", recovery_profile=tmp_path / "none.json")


def test_methods_are_made_from_the_profile():
    profile = profile_of()
    assert method("patchkv", profile) == setup_named("default", profile) == profile.setup
    assert setup_named("exact", profile).policy.is_exact
