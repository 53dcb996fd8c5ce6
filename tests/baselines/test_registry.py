"""The methods by name, and what sets each apart."""

from __future__ import annotations

from dataclasses import fields

import pytest

from patchkv_agents.baselines import method, method_names
from patchkv_agents.errors import InputError
from patchkv_agents.recovery import RecoveryPolicy, RowLabel

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
    assert method("patchkv") == RecoveryPolicy.default()
    assert method("patchkv_published") == RecoveryPolicy.published()


def test_an_unknown_method_is_refused_with_the_names():
    with pytest.raises(InputError, match=r"no method 'full_prefill'.* prefix_cache, direct_reuse"):
        method("full_prefill")


@pytest.mark.parametrize("name", sorted(set(method_names()) - PUBLISHED_NAMES))
def test_an_ablation_changes_one_thing(name):
    default, changed = RecoveryPolicy.default(), method(name)
    differing = {
        field.name
        for field in fields(default)
        if getattr(default, field.name) != getattr(changed, field.name)
    }
    assert len(differing - {"name"}) == 1


@pytest.mark.parametrize("name", method_names())
def test_every_method_runs_as_its_name_says(name):
    """On one edit: which rows are computed, and in which formats the others were stored."""
    old, policy = random_ids(1, 600), method(name)
    sequence = sequence_of(tiny_model("llama"))
    sequence.resume(old, policy)
    sequence.suspend()
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
    # 490 tokens behind the edit at 100 to 114; blocks of 32 from token 0. A contiguous window has
    # as many rows as the default, the last token among them.
    window, tail = 256 - 114, 604 - 512
    assert computed == {
        "prefix_cache": {"NEW": 14, "WINDOW": 490},
        "direct_reuse": {"NEW": 14, "TAIL": 1},
        "cacheblend": {"NEW": 14, "TAIL": 32, "DEVIATION": int(0.16 * 458)},
        "cacheblend_released": {"NEW": 14, "TAIL": 32, "DEVIATION": int(0.16 * 458)},
        "patchkv_published": {
            "NEW": 14,
            "WINDOW": window,
            "TAIL": 1,
            "ATTENTION": computed.get("ATTENTION"),
        },
        "patchkv_no_attention": {"NEW": 14, "WINDOW": window, "TAIL": tail},
        "patchkv_no_window": {"NEW": 14, "TAIL": tail, "ATTENTION": 32},
        "patchkv_no_tail": {"NEW": 14, "WINDOW": window, "TAIL": 1, "ATTENTION": 32},
        "patchkv_contiguous": {"NEW": 14, "WINDOW": window + tail + 32 - 1, "TAIL": 1},
    }.get(name, {"NEW": 14, "WINDOW": window, "TAIL": tail, "ATTENTION": 32})
