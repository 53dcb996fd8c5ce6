"""The benchmarks that run a model, on tiny random weights: fields, and figures that must hold."""

from __future__ import annotations

import json

import numpy as np
import pytest

from patchkv_agents.alignment import align
from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError
from patchkv_evals.benchmarks import contexts, resume
from patchkv_evals.errors import EpisodeError
from tests.engine.models import tiny_engine

TOKENS = 1000

RESUME_FIELDS = {
    "sweep", "value", "method", "tokens", "tokens_old", "position", "edit_tokens", "ttft_ms",
    "ttft_rounds_ms", "planning_ms", "restore_ms", "recompute_ms", "speedup", "recompute_ratio",
    "repair_ratio", "payload_bytes", "payload_ratio", "first_token_kl", "top1_agree",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer) -> Engine:
    return tiny_engine(smollm2_tokenizer, 16_384)


def by_method(result, value=None):
    return {point["method"]: point for point in result.points if value in (None, point["value"])}


def test_a_sweep_of_lengths_has_a_point_for_each_method_and_length(engine):
    steps: list[str] = []
    config = resume.ResumeConfig(values=(900, 1200, 1600), rounds=2)
    result = resume.resume(engine, config, steps.append)

    methods = ["prefix_cache", "direct_reuse", "cacheblend", "patchkv"]
    assert [(p["value"], p["method"]) for p in result.points] == [
        (value, name) for value in (900, 1200, 1600) for name in methods
    ]
    for point in result.points:
        assert set(point) == RESUME_FIELDS
        assert point["tokens"] == point["value"]
        assert len(point["ttft_rounds_ms"]) == 2
        assert point["ttft_ms"] == pytest.approx(np.mean(point["ttft_rounds_ms"]))
    last = by_method(result, 1600)
    assert last["prefix_cache"]["speedup"] == 1.0
    assert last["prefix_cache"]["first_token_kl"] == pytest.approx(0.0, abs=1e-6)
    assert last["prefix_cache"]["recompute_ratio"] == 1.0
    times = {name: point["ttft_ms"] for name, point in last.items()}
    assert last["patchkv"]["speedup"] == pytest.approx(times["prefix_cache"] / times["patchkv"])
    assert last["direct_reuse"]["recompute_ratio"] < last["patchkv"]["recompute_ratio"] < 1.0
    assert last["patchkv"]["payload_ratio"] < 0.7 < last["direct_reuse"]["payload_ratio"]
    assert len(steps) == 3 and "left" in steps[-1]
    assert json.loads(json.dumps(result.document()))["points"] == list(result.points)


def test_the_edit_lies_where_the_sweep_of_positions_says(engine):
    config = resume.ResumeConfig("position", (0.3, 0.7), tokens=TOKENS, rounds=1, baselines=())
    result = resume.resume(engine, config)
    for point in result.points:
        assert point["position"] == pytest.approx(point["value"], abs=2 / TOKENS)
        assert point["edit_tokens"] == pytest.approx(resume.DEFAULT_EDIT_TOKENS, abs=2)
    assert {p["method"] for p in result.points} == {"prefix_cache", "patchkv"}


def test_larger_edits_compute_more_rows(engine):
    config = resume.ResumeConfig("edit_size", (16, 128), tokens=TOKENS, rounds=1, baselines=())
    result = resume.resume(engine, config)
    small, large = (by_method(result, size)["patchkv"] for size in (16, 128))
    assert (small["edit_tokens"], large["edit_tokens"]) == pytest.approx((16, 128), abs=2)
    assert small["recompute_ratio"] < large["recompute_ratio"]


def test_sweeps_of_the_policy_vary_patchkv_alone(engine):
    config = resume.ResumeConfig("attention", (0.0, 0.2), TOKENS, position=0.2, rounds=1)
    result = resume.resume(engine, config)
    assert [p["value"] for p in result.points] == [None, None, None, 0.0, 0.2]
    none, much = result.points[3:]
    assert none["repair_ratio"] < much["repair_ratio"]

    config = resume.ResumeConfig("block", (16, 128), TOKENS, 0.2, rounds=1, baselines=())
    fine, coarse = resume.resume(engine, config).points[1:]
    assert fine["repair_ratio"] < coarse["repair_ratio"]

    config = resume.ResumeConfig("precision", (), TOKENS, 0.2, rounds=1, baselines=())
    stored = {p["value"]: p["payload_ratio"] for p in resume.resume(engine, config).points[1:]}
    assert stored["int4"] < stored["mixed"] < stored["int8"] < stored["fp16"]


def test_what_cannot_be_swept_is_said():
    with pytest.raises(InputError, match="no sweep 'depth': use one of length"):
        resume.ResumeConfig("depth")
    with pytest.raises(InputError, match="no precision 'int3'"):
        resume.ResumeConfig("precision", ("int3",))


@pytest.mark.parametrize("tokens", [700, 2000, 12_000])
def test_contexts_of_other_lengths_have_the_same_edit_in_the_same_place(engine, tokens):
    episode, other = (contexts.demo_context(engine.tokenizer, size) for size in (3000, tokens))
    assert len(other.new) == tokens
    assert other.edit[1] == episode.edit[1]
    assert other.edit[0] / tokens == pytest.approx(0.2, abs=0.001)
    assert (other.new[-40:] == episode.new[-40:]).all()  # the question
    assert (other.new[:64] == episode.new[:64]).all()
    assert len(align(other.old, other.new).hunks) == len(align(episode.old, episode.new).hunks)


def test_where_a_tokenizer_needs_fewer_tokens_for_the_text_it_is_repeated(engine, monkeypatch):
    """Vocabularies of 150,000 tokens and more may make less than 8,000 of the whole text."""
    build = contexts.build_episode

    def with_less_text(tokens, count):
        if tokens > 6000:
            raise InputError("the demo's episode has text for at most 6000 tokens")
        return build(tokens, count)

    monkeypatch.setattr(contexts, "build_episode", with_less_text)
    context = contexts.demo_context(engine.tokenizer, 7000)
    assert len(context.new) == 7000 and context.name == "demo, repeated"


def test_an_edit_that_does_not_fit_or_changes_nothing_is_refused(engine):
    with pytest.raises(InputError, match="does not fit into 50 tokens"):
        contexts.demo_context(engine.tokenizer, 50)
    with pytest.raises(InputError, match="of 500 tokens at 99% does not fit"):
        contexts.spliced_context(engine.tokenizer, TOKENS, position=0.99, edit_tokens=500)
    same = contexts.EditedContext("same", np.arange(9), np.arange(9))
    with pytest.raises(EpisodeError, match="are the same"):
        _ = same.edit
