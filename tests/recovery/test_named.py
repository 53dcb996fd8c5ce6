"""The methods by name, and what sets each apart."""

from __future__ import annotations

from dataclasses import fields

import pytest

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.errors import InputError
from patchkv_agents.recovery import RecoveryPolicy, RecoverySetup, RowLabel, WindowModel
from patchkv_agents.recovery.named import ablations, method, method_names, setup_named
from patchkv_agents.recovery.profile import Profile

from ..engine.models import edited, random_ids, sequence_of, tiny_model

PUBLISHED_NAMES = {
    "prefix_cache",
    "direct_reuse",
    "cacheblend",
    "cacheblend_released",
    "patchkv_published",
    "patchkv",
}


def test_every_method_has_the_name_of_its_policy():
    assert set(method_names()) > PUBLISHED_NAMES
    for name in method_names():
        assert method(name).name == name
    mix = PrecisionPolicy()
    assert method("patchkv") == RecoverySetup(RecoveryPolicy.default(), mix)
    assert method("patchkv_published") == RecoverySetup(RecoveryPolicy.published(), mix)


def test_an_unknown_method_is_refused_with_the_names():
    with pytest.raises(InputError, match=r"no method 'full_prefill'.* prefix_cache, direct_reuse"):
        method("full_prefill")


EVERYTHING = RecoveryPolicy.default().varied(
    window_model=WindowModel(0.0, (0.0, 1.0, 0.0, 0.0, 0.0, 0.0)),
)
PARTS = {
    "no_window": {"window_tokens", "window_model"},
    "no_tail": {"tail_tokens"},
    **dict.fromkeys(("attention", "no_attention", "contiguous", "edited", "question"), {"rule"}),
    "uncapped": {"max_repaired"},
    **dict.fromkeys(("fp16", "int8", "int4"), {"storage"}),
}


def test_an_ablation_changes_its_part_of_a_method_and_nothing_else():
    setup = RecoverySetup(EVERYTHING, PrecisionPolicy())
    changed = {each.name: each for each in ablations(setup)}
    assert set(changed) == {f"patchkv_{part}" for part in PARTS}
    assert set(changed) == set(method_names()) - PUBLISHED_NAMES
    for part, expected in PARTS.items():
        other = changed[f"patchkv_{part}"]
        differing = {
            field.name
            for field in fields(other.policy.method)
            if getattr(other.policy.method, field.name) != getattr(EVERYTHING.method, field.name)
        }
        if other.storage != setup.storage:
            differing.add("storage")
        assert differing == expected, part


def test_a_profile_gives_its_policies_and_their_ablations():
    published = RecoveryPolicy.published().varied(kappa=0.05)
    profile = Profile(
        model="tiny",
        fingerprint="f" * 64,
        policy=EVERYTHING,
        published=published,
        storage=PrecisionPolicy(tau_low=0.3),
        data=(),
        fit={},
        versions={},
        created="2026-11-30T09:00:00+00:00",
        command="patchkv profile tiny",
        validation=None,
    )
    assert method("patchkv", profile) == setup_named("default", profile) == profile.setup
    assert profile.setup == RecoverySetup(EVERYTHING, PrecisionPolicy(tau_low=0.3))
    assert method("patchkv_published", profile) == RecoverySetup(published, profile.storage)
    assert (
        method("patchkv_uncapped", profile).policy.method.window_model
        == EVERYTHING.method.window_model
    )
    for name in ("prefix_cache", "direct_reuse", "cacheblend"):
        assert method(name, profile) == method(name)
    assert setup_named("exact", profile) == RecoverySetup(RecoveryPolicy.exact())
    with pytest.raises(InputError, match="no method 'patchkv_none'"):
        setup_named("patchkv_none", profile)


@pytest.mark.parametrize("name", method_names())
def test_every_method_runs_as_its_name_says(name):
    """On one edit: which rows are computed, and in which formats the others were stored."""
    old, setup = random_ids(1, 2000), method(name)
    policy = setup.policy
    sequence = sequence_of(tiny_model("llama")).fork(storage=setup.storage)
    sequence.resume(old, policy)
    sequence.suspend("now")
    resumed = sequence.resume(edited(old, [(100, 10, 14)]), policy)
    plan, formats = resumed.plan, set(resumed.restored_formats)
    assert plan.is_exact == (name == "prefix_cache")
    lossless = ("prefix_cache", "direct_reuse", "cacheblend", "cacheblend_released")
    fixed = {"patchkv_fp16": "f16", "patchkv_int8": "k8v8", "patchkv_int4": "k4v4"}
    if name in lossless:
        assert formats == {"native"}
    elif name in fixed:
        assert formats == {fixed[name]}
    else:
        assert "k8v4" in formats
    computed = {label.name: plan.count(label) for label in RowLabel if plan.count(label)}
    del computed["PREFIX" if name in lossless else "RESTORED"]
    computed.pop("RESTORED", None)
    # 1890 tokens behind the edit at 100 to 114, of which 236 may be computed. A contiguous window
    # has as many rows as the default, the last token among them. Published is by blocks of 32.
    window, tail = 64, 64
    attention = {"ATTENTION": 114}  # 6 %, which leave 58 rows of the window under the limit
    assert computed == {
        "prefix_cache": {"NEW": 14, "WINDOW": 1890},
        "direct_reuse": {"NEW": 14, "TAIL": 1},
        "cacheblend": {"NEW": 14, "TAIL": 32, "DEVIATION": int(0.16 * 1858)},
        "cacheblend_released": {"NEW": 14, "TAIL": 32, "DEVIATION": int(0.16 * 1858)},
        "patchkv_published": {
            "NEW": 14,
            "WINDOW": 256 - 114,
            "TAIL": 1,
            "ATTENTION": computed.get("ATTENTION"),
        },
        "patchkv_no_attention": {"NEW": 14, "WINDOW": window, "TAIL": tail},
        "patchkv_no_window": {"NEW": 14, "TAIL": tail, **attention},
        "patchkv_no_tail": {"NEW": 14, "WINDOW": window, "TAIL": 1, **attention},
        "patchkv_contiguous": {"NEW": 14, "WINDOW": 235, "TAIL": 1},
        "patchkv_uncapped": {"NEW": 14, "WINDOW": window, "TAIL": tail, **attention},
    }.get(name, {"NEW": 14, "WINDOW": 58, "TAIL": tail, **attention})
