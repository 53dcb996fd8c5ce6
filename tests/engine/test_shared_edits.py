"""Realistic edits of agent contexts through rendering, alignment and recovery."""

from __future__ import annotations

import json

import pytest
import torch

from patchkv_agents.recovery import RecoveryPolicy

from .models import full_logits, tiny_engine

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer):
    return tiny_engine(smollm2_tokenizer, max_tokens=8192)  # room for the longest case


def versions(case):
    tools = case["tools"]
    yield case["old"], tools
    yield case["new"], case.get("tools_new", tools)
    if "next" in case:
        yield case["next"], case.get("tools_next", case.get("tools_new", tools))


@pytest.mark.parametrize("number", range(19))
def test_each_case_recovers(engine, shared_dir, number):
    """One thread goes through all versions of a case by the default policy, suspended in between;
    the prefix it keeps is exact, so that an exact resume at the end is a full prefill."""
    path = sorted((shared_dir / "edits").glob("*.json"))[number]
    case = json.loads(path.read_text(encoding="utf-8"))
    thread = engine.thread(path.stem)
    for index, (messages, tools) in enumerate(versions(case)):
        reply = thread.generate(
            messages, tools=tools, policy=RecoveryPolicy.default(), max_new_tokens=3
        )
        report = reply.report
        assert report.fallback_reason is None
        if index:
            assert report.restored > 0 and not report.is_exact
            assert report.recompute_ratio < 0.6
        thread.suspend()
    exact = thread.generate(messages, tools=tools, policy=RecoveryPolicy.exact(), max_new_tokens=1)
    assert exact.report.is_exact
    token_ids = thread.sequence.token_ids[: exact.report.tokens]
    expected = full_logits(engine.adapter.model, token_ids)
    torch.testing.assert_close(exact.first_logits, expected, atol=TOLERANCE, rtol=0)
    engine.drop(path.stem)
