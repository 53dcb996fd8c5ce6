"""The benchmarks that run a model, on tiny random weights: fields, and figures that must hold."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from patchkv_agents.alignment import align
from patchkv_agents.engine import Engine
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.errors import InputError
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_evals.benchmarks import attention, contexts, drift, packing, resume
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


def test_a_sweep_of_lengths_has_a_point_for_each_method_and_length_and_fits(engine):
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
    assert [fit["method"] for fit in result.fits] == methods
    assert all(fit["residual"] >= 0 for fit in result.fits)
    assert len(resume.notes(result)) == 4
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


def test_the_overhead_of_the_capture_comes_from_its_own_rounds(engine):
    result = attention.attention(engine, attention.AttentionConfig((900,), rounds=3))
    (point,) = result.points
    assert set(point) == {
        "tokens", "prefill_ms", "prefill_rounds_ms", "captured_ms", "captured_rounds_ms",
        "mapped_ms", "mapped_rounds_ms",
        "overhead", "observe_share", "mapped_overhead", "mapped_share",
    }  # fmt: skip
    assert len(point["captured_rounds_ms"]) == len(point["mapped_rounds_ms"]) == 3
    assert point["overhead"] == pytest.approx(point["captured_ms"] / point["prefill_ms"] - 1)
    assert point["mapped_overhead"] == pytest.approx(point["mapped_ms"] / point["prefill_ms"] - 1)
    assert 0 < point["observe_share"] < 1 and 0 < point["mapped_share"]


def test_packing_runs_the_same_number_of_rows_in_turn_and_at_once(engine, monkeypatch):
    ran: list[int] = []
    forward = engine.adapter.forward_rows

    def counted(token_ids, rows, cache):
        ran.append(len(rows))
        return forward(token_ids, rows, cache)

    monkeypatch.setattr(engine.adapter, "forward_rows", counted)
    config = packing.PackingConfig(600, threads=3, rows=(1, 200), rounds=1)
    points = packing.packing(engine, config).points
    assert ran == [600, *[1, 1, 1, 3] * 2, *[200, 200, 200, 600] * 2]
    for point in points:
        assert set(point) == {
            "rows", "in_turn_ms", "in_turn_rounds_ms", "packed_ms", "packed_rounds_ms", "gain",
        }  # fmt: skip
        assert point["gain"] == pytest.approx(point["in_turn_ms"] / point["packed_ms"])
    with pytest.raises(InputError, match="3 threads of 300 rows"):
        packing.PackingConfig(600, threads=3, rows=(300,))


def test_drift_is_that_of_separate_prefills_block_by_block(engine):
    """Values and keys of one block, recomputed here from two sequences of their own."""
    context = contexts.demo_context(engine.tokenizer, TOKENS)
    result = drift.drift(engine, drift.DriftConfig(tokens=TOKENS))
    assert {"context", "edit", "distance", "tokens", *drift.FIELDS} == set(result.points[0])
    (hunk,) = align(context.old, context.new).hunks
    assert sum(p["tokens"] for p in result.points) == len(context.new) - hunk.new_stop
    assert result.points[0]["distance"] == 0

    def prefilled(token_ids):
        sequence = KVSequence(engine.adapter, engine.rope)
        sequence.resume(token_ids, RecoveryPolicy.exact())
        return sequence.live_cache.shards[0].values

    old, new = prefilled(context.old), prefilled(context.new)
    point = result.points[-1]
    stop, shift = len(context.new), len(context.old) - len(context.new)
    rows = slice(stop - point["tokens"], stop)
    moved = slice(rows.start + shift, rows.stop + shift)
    before, after = old[:, :, moved].transpose(1, 2).flatten(2), new[:, :, rows].transpose(1, 2)
    after = after.flatten(2)
    expected = ((before - after).norm(dim=2) / after.norm(dim=2)).median()
    assert point["value_drift"] == pytest.approx(float(expected), rel=1e-3)


def test_moving_the_keys_brings_them_nearer(engine):
    points = drift.drift(engine, drift.DriftConfig(tokens=TOKENS)).points
    moved, unmoved = (
        torch.tensor([p[name] for p in points]).median()
        for name in ("key_drift", "key_drift_unmoved")
    )
    assert moved < unmoved
    lines = drift.by_distance(points)
    assert sum(line["blocks"] for line in lines) == len(points)
    assert [line["from"] for line in lines] == sorted(line["from"] for line in lines)


def test_drift_on_a_second_data_set_replaces_nothing_and_says_what_was_edited(
    engine, tmp_path, monkeypatch
):
    context = contexts.demo_context(engine.tokenizer, TOKENS)
    monkeypatch.setattr(drift, "edited_contexts", lambda *args, **options: [context])
    settings = ({}, {"data": "a", "dataset": "hotpotqa"}, {"data": "b", "dataset": "triviaqa"})
    files = set()
    for given in settings:
        result = drift.drift(engine, drift.DriftConfig(tokens=TOKENS, edit="clear", **given))
        assert {point["edit"] for point in result.points} == {result.config["edit"]}
        assert result.config["edit"] == ("clear" if given else "refresh")
        files.add(result.write(tmp_path).name)
    assert files == {"bench-drift.json", "bench-drift-hotpotqa.json", "bench-drift-triviaqa.json"}


def test_data_needs_the_name_of_its_data_set():
    with pytest.raises(InputError, match="--data and --dataset"):
        drift.DriftConfig(data="rows.jsonl")
