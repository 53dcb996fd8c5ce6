"""Trials: what they measure, that states are shared, and that an interrupted run goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.context import Conversation, parse_messages
from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError, PatchKVError
from patchkv_agents.profiling.comparison import compare_methods
from patchkv_agents.profiling.pairs import ContextPair
from patchkv_agents.profiling.trials import Trials, setup_key
from patchkv_agents.recovery import Blocks, Edited, RecoveryPolicy, RecoverySetup, Window
from tests.engine.models import tiny_engine

PREFIX_CACHE = RecoveryPolicy.named("prefix_cache")
DIRECT_REUSE = RecoveryPolicy.named("direct_reuse")

POLICY = RecoveryPolicy("short", Window(32, tail_tokens=32, block_size=32))


def conversation(result: str) -> Conversation:
    return Conversation(
        parse_messages(
            [
                {"role": "user", "content": f"{result} What follows from it? " * 6},
                {"role": "user", "content": "Say why that is, and what else you know. " * 20},
            ]
        )
    )


def pair(id: str, old: str = "It rains.", new: str = "It snows.") -> ContextPair:
    return ContextPair(id, id, "refresh", "d", conversation(old), conversation(new))


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer) -> Engine:
    return tiny_engine(smollm2_tokenizer, 2048)


def test_a_trial_says_what_the_comparison_of_methods_says(engine):
    one = replace(pair("one"), answers=("snow",), stale_answers=("rain",))
    trial = Trials(engine, [one], answer_tokens=16).run([POLICY])[0]
    result = compare_methods(
        engine, one.old, one.new, [RecoverySetup(POLICY)], max_new_tokens=16
    ).methods["short"]
    assert trial.first_token_kl == pytest.approx(result.first_token_kl, rel=1e-3) and (
        trial.first_token_kl > 0
    )
    report = result.reply.report
    assert (trial.new_tokens, trial.window_tokens, trial.attention_tokens, trial.tail_tokens) == (
        report.new, report.window, report.attention, report.tail
    )  # fmt: skip
    assert trial.repair_ratio == report.repair_ratio
    assert trial.exact_continuation == result.exact_continuation
    assert trial.stale is False and trial.full_prefill_stale is False  # a random model says neither


def test_an_exact_policy_differs_in_nothing(engine):
    exact, moved = Trials(engine, [pair("one")]).run([PREFIX_CACHE, DIRECT_REUSE])
    assert exact.first_token_kl < 1e-8 < moved.first_token_kl
    assert (exact.repair_ratio, exact.top1_agree) == (1.0, True)
    assert exact.exact_continuation is exact.same_answer is exact.stale is None


def test_a_second_run_takes_what_is_logged_and_runs_what_is_not(engine, tmp_path: Path):
    log = tmp_path / "work" / "trials.jsonl"
    pairs = [pair("one"), pair("two", new="It hails.")]
    first = Trials(engine, pairs[:1], log).run([POLICY])
    log.write_bytes(log.read_bytes() + b'{"torn')  # killed while it wrote
    told: list[str] = []
    trials = Trials(engine, pairs, log)
    renamed = replace(POLICY, name="other name")
    found = trials.run([renamed], progress=lambda state: told.append(state.doing))
    assert told == ["two"]
    assert found[0] == first[0] and [each.pair for each in found] == ["one", "two"]
    assert trials.of(POLICY) == found and trials.of(DIRECT_REUSE) == []
    other_ids = [replace(each, id=f"{each.id} again") for each in pairs]
    assert [each.pair for each in Trials(engine, other_ids, log).of(POLICY)] == [
        "one again",
        "two again",
    ]
    told.clear()
    assert (
        Trials(engine, pairs, log).run([POLICY], progress=lambda s: told.append(s.doing)) == found
    )
    assert told == []


def test_other_contexts_under_the_same_id_are_run_again(engine, tmp_path: Path):
    log = tmp_path / "trials.jsonl"
    first = Trials(engine, [pair("one")], log).run([POLICY])
    second = Trials(engine, [pair("one", new="It hails.")], log).run([POLICY])
    assert second[0].first_token_kl != first[0].first_token_kl


def test_a_log_of_another_run_is_refused(engine, tmp_path: Path):
    log = tmp_path / "trials.jsonl"
    Trials(engine, [pair("one")], log).run([POLICY])
    with pytest.raises(InputError, match="answer_tokens"):
        Trials(engine, [pair("one")], log, answer_tokens=16)


def test_each_context_is_prefilled_once_and_may_be_observed(engine):
    cold: list[int] = []
    seen: list[str] = []

    def observe(of, states):
        for context in (of.old, of.new):
            seen.append(states.exact(context).reply.report.policy)

    original = engine.observer
    engine.observer = lambda answered: cold.append(
        answered.report.restored == 0 == answered.report.prefix
    )
    try:
        Trials(engine, [pair("one")]).run(
            [POLICY, DIRECT_REUSE, PREFIX_CACHE],
            observe=observe,
        )
    finally:
        engine.observer = original
    assert sum(cold) == 2 and seen == ["exact", "exact"]


def test_logits_that_are_no_numbers_are_an_error(smollm2_tokenizer):
    engine = tiny_engine(smollm2_tokenizer, 2048)
    with torch.no_grad():
        engine.adapter.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(PatchKVError, match="not numbers"):
        Trials(engine, [pair("one")]).run([POLICY])


def test_names_do_not_count_in_a_policys_key():
    setup = RecoverySetup(POLICY)
    others = replace(POLICY, name="x"), POLICY.varied(tail_tokens=33)
    assert setup_key(setup) == setup_key(replace(setup, policy=others[0]))
    assert setup_key(setup) != setup_key(replace(setup, policy=others[1]))
    assert setup_key(setup) != setup_key(replace(setup, storage=PrecisionPolicy()))


def test_selections_that_need_a_map_of_blocks_find_one(engine):
    """States without a map would make them choose as received attention does, unseen."""
    maps: list[bool] = []

    def observe(of, states):
        maps.append(states.exact(of.old).thread.sequence.checkpoint.block_map is not None)

    edited = POLICY.varied(rule=Edited(0.1))
    for policy in (edited, edited.varied(rule=Blocks(0.1))):
        Trials(engine, [pair("one")]).run([policy], observe=observe)
    assert maps == [True, False]
