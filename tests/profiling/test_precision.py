"""Forced answers, block sensitivity and the choice of precision, on tiny random weights."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from patchkv_agents.context import Conversation, parse_messages
from patchkv_agents.divergence import first_token_kl
from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError
from patchkv_agents.profiling import precision
from patchkv_agents.profiling.forced import exact_prompt
from patchkv_agents.profiling.low_precision import (
    LoweredPrompt,
    block_lengths,
    exact_rows,
    stored_rows,
)
from patchkv_agents.profiling.pairs import ContextPair
from patchkv_agents.profiling.precision import PrecisionTarget, fit_precision
from patchkv_agents.ranges import RowSet
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_kernels import PayloadFormat
from tests.engine.models import full_logits, tiny_engine

WORDS = "harbour ferry granite lighthouse winter keys north quay timber herring ice lamp".split()


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer) -> Engine:
    return tiny_engine(smollm2_tokenizer, 2048)


def ids_of(engine: Engine, tokens: int, seed: int = 0):
    return np.random.default_rng(seed).integers(3, len(engine.tokenizer), tokens)


def pairs_of(count: int, words: int = 90) -> list[ContextPair]:
    rng = np.random.default_rng(5)
    pairs = []
    for index in range(count):
        text = " ".join(rng.choice(WORDS, words))
        old, new = (
            Conversation(parse_messages([{"role": "user", "content": f"{lead} {text}"}]))
            for lead in ("Old", "New")
        )
        pairs.append(ContextPair(f"p{index}", f"t{index}", "refresh", "made", old, new))
    return pairs


def test_the_forced_answer_is_the_greedy_one_and_its_logits_those_of_plain_calls(engine):
    ids = ids_of(engine, 90)
    prompt = exact_prompt(engine, ids, answer_tokens=4)
    context = ids
    for place, token in enumerate(prompt.answer):
        logits = full_logits(engine.adapter.model, context)
        assert int(logits.argmax()) == token
        torch.testing.assert_close(prompt.logits[place], logits, rtol=1e-4, atol=1e-4)
        context = np.append(context, token)
    assert len(prompt.answer) == 4 or prompt.answer[-1] in engine.end_tokens
    same = prompt.divergence(engine, prompt.cache, RowSet(()))
    assert (same.kl, same.first_kl, same.same_answer) == (0.0, 0.0, True)


def test_divergence_is_that_of_other_rows_and_goes_when_they_are_computed(engine):
    ids = ids_of(engine, 90)
    prompt = exact_prompt(engine, ids, answer_tokens=3)
    for shard in prompt.cache.shards:
        shard.values[:, :, 40:50] *= -3.0
    worse = prompt.divergence(engine, prompt.cache, RowSet(()))
    logits = engine.adapter.forward_rows(ids, RowSet.of_range(89, 90), prompt.cache)
    assert worse.first_kl == pytest.approx(first_token_kl(prompt.logits[0], logits), rel=1e-4)
    assert worse.kl > 1e-3
    mended = prompt.divergence(engine, prompt.cache, RowSet.of_range(40, 90))
    assert mended.kl < 1e-8 and mended.same_answer


def test_rows_come_back_as_they_were(engine):
    prompt = exact_prompt(engine, ids_of(engine, 100), answer_tokens=1)
    (shard,) = prompt.cache.shards
    before = shard.values.clone()
    exact = exact_rows(prompt.cache, 99)
    lowered = stored_rows(engine, prompt.cache, block_lengths(99, 32), PayloadFormat.K8V4)
    assert lowered.row_bytes < 0.6 * exact.row_bytes
    rows = np.zeros(99, dtype=bool)
    rows[32:64] = True
    lowered.write(prompt.cache, rows)
    changed = (shard.values[:, :, :99] - before[:, :, :99]).abs().amax(dim=(0, 1, 3)) > 0
    assert changed[32:64].all() and not changed[:32].any() and not changed[64:].any()
    exact.write(prompt.cache, rows)
    assert torch.equal(shard.values[:, :, :99], before[:, :, :99])


def test_the_fewest_bytes_that_meet_the_target_are_chosen(engine, tmp_path):
    pairs = pairs_of(2)

    def fitted(median_kl, p90_kl):
        return fit_precision(
            engine,
            pairs,
            target=PrecisionTarget(median_kl, p90_kl),
            log=tmp_path / "precision.jsonl",  # measured once, for all targets
        )

    loose, record = fitted(1e3, 1e3)
    frontier = [e for e in record["frontier"] if e["block_size"] == 32]
    assert record["met"] and record["chosen"]["payload_ratio"] == frontier[0]["payload_ratio"]
    assert record["chosen"]["payload_ratio"] <= record["defaults"]["payload_ratio"]
    assert loose.tau_4 >= 0.05 and len(record["prompts"]) == 2
    assert {e["block_size"] for e in record["frontier"]} == set(precision.BLOCK_SIZES)
    ratios = [e["payload_ratio"] for e in frontier]
    assert ratios == sorted(ratios)
    kls = [e["kl_median"] for e in frontier]
    assert kls == sorted(kls, reverse=True)

    middle = record["uniform"]["k8v8"]["kl_median"] * 1.2
    strict, record = fitted(middle, 1e3)
    assert record["met"] and record["chosen"]["kl_median"] <= middle
    assert strict.tau_low < loose.tau_low and "met without a limit" in record["tau_4"]

    _, record = fitted(1e-12, 1e-12)
    assert not record["met"] and "missed" in record["tau_4"]
    assert record["chosen"]["payload_ratio"] > record["uniform"]["k8v8"]["payload_ratio"]
    json.dumps(record, allow_nan=False)


def test_what_is_chosen_does_in_a_checkpoint_what_it_did_here(engine):
    """Bytes and formats are composed here; storage itself must come to the same."""
    from patchkv_agents.engine import Thread

    pairs = pairs_of(2)
    chosen, record = fit_precision(engine, pairs, prompts=2)
    policy = RecoveryPolicy.default()
    ratios = []
    for pair in pairs:
        thread: Thread = engine.thread(f"fit/{pair.id}", new=True, storage=chosen)
        thread.generate(pair.old.messages, policy=policy, max_new_tokens=1)
        thread.suspend("now")
        engine.flush()
        stored = thread.sequence.checkpoint
        rows = 4 * engine.adapter.layers * engine.adapter.kv_heads * engine.adapter.head_dim
        payloads = {id(e.payload): e.payload for e in stored.extents}
        whole = [p for p in payloads.values() if p.format is not PayloadFormat.NATIVE]
        ratios.append(sum(p.nbytes for p in whole) / (rows * sum(p.rows for p in whole)))
        engine.drop(thread.id)
    assert record["chosen"]["payload_ratio"] == pytest.approx(np.mean(ratios), rel=0.1)


def test_an_interrupted_run_goes_on(engine, tmp_path, monkeypatch):
    pairs, log = pairs_of(2), tmp_path / "precision.jsonl"
    first = fit_precision(engine, pairs, log=log)
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:-1]) + "\n")
    measured: list[int] = []
    kept = LoweredPrompt.measured

    def counted(self, formats):
        measured.append(len(formats))
        return kept(self, formats)

    monkeypatch.setattr(LoweredPrompt, "measured", counted)
    assert fit_precision(engine, pairs, log=log) == first
    assert measured and len(set(measured)) == 1  # of the last prompt alone
    assert log.read_text().splitlines() == lines
    monkeypatch.setattr(precision, "__version__", "0.0.0")
    with pytest.raises(InputError, match="differs in release"):
        fit_precision(engine, pairs, log=log)


def test_contexts_of_different_tasks_come_first_and_each_once(engine):
    pairs = pairs_of(3)
    doubled = [pairs[0], replace(pairs[0], id="again"), replace(pairs[1], task="t0"), pairs[2]]
    found = precision._prompts(engine, doubled, 2)
    texts = [engine.tokenizer.decode(ids) for ids in found]
    assert pairs[0].old.messages[0].content in texts[0]
    assert pairs[2].old.messages[0].content in texts[1]
    with pytest.raises(InputError, match="at least 2 different contexts"):
        fit_precision(engine, [pairs[0], pairs[0]])
