"""The pool of threads: one budget, one order of use, and calls that never notice."""

from __future__ import annotations

import gc
import threading

import pytest

from patchkv_agents.checkpoint.stores import MemoryStore
from patchkv_agents.context import MemoryHistoryStore
from patchkv_agents.engine import Engine
from patchkv_agents.recovery import RecoveryPolicy

from .test_sharing import run_all
from .test_thread import MESSAGES, edited

DEFAULT = RecoveryPolicy.default()


@pytest.fixture
def pooled(engine):
    """Engines of their own over the model, with limits."""

    def made(**limits):
        return Engine(engine.adapter.model, engine.tokenizer, **limits)

    return made


def answered(engine, *names, policy=DEFAULT):
    threads = [engine.thread(name) for name in names]
    for thread in threads:
        thread.generate(MESSAGES, policy=policy, max_new_tokens=1)
    return threads


def test_a_plain_append_stays_exact_after_a_suspend(pooled):
    """The default policy stored with loss at each suspend, though memory was free: what followed
    was an approximation for good."""
    (thread,) = answered(pooled(), "t")
    thread.suspend()
    turn = [*MESSAGES, {"role": "user", "content": "And the museum?"}]
    report = thread.generate(turn, policy=DEFAULT, max_new_tokens=1).report
    assert report.is_exact and report.restored == 0 and report.prefix > 100
    assert set(report.restored_formats) == {"native"}


def test_the_budget_is_of_all_threads_together(pooled):
    """Each thread could keep 2 GiB, and live caches counted nowhere."""
    engine = pooled(memory_budget_bytes=10**12)
    threads = answered(engine, "a", "b", "c", "d")
    live, stored = engine.pool.memory()
    assert live == 4 * threads[0].sequence.live_bytes and stored == 0
    engine.pool.memory_budget_bytes = live * 7 // 8
    answered(engine, "d")
    assert sum(engine.pool.memory()) <= live * 7 // 8
    assert [thread.sequence.is_live for thread in threads] == [False, True, True, True]
    assert threads[0].sequence.checkpoint.origins.any()  # with loss: there is no room
    report = threads[0].generate(MESSAGES, policy=DEFAULT, max_new_tokens=1).report
    assert set(report.restored_formats) > {"native"} and report.restored > 0
    engine.pool.memory_budget_bytes = 1
    engine.pool.fit()
    assert sum(len(thread.sequence.token_ids) > 0 for thread in threads) <= 1
    again = threads[1].generate(MESSAGES, policy=DEFAULT, max_new_tokens=1).report
    assert again.is_exact and again.new == again.tokens


def test_an_exact_policy_loses_versions_and_never_precision(pooled):
    engine = pooled(memory_budget_bytes=10**12)
    threads = answered(engine, "a", "b", "c", policy=None)
    engine.pool.memory_budget_bytes = threads[0].sequence.live_bytes * 3 // 2
    engine.pool.fit()
    assert not any(thread.sequence.checkpoint.origins.any() for thread in threads)
    kept = [len(thread.sequence.token_ids) > 0 for thread in threads]
    assert kept[2] and not kept[0]


def test_what_was_evicted_comes_back_from_the_store(pooled):
    engine = pooled(memory_budget_bytes=10**12, store=MemoryStore())
    threads = answered(engine, "a", "b")
    for thread in threads:
        thread.suspend()
    engine.flush()
    engine.pool.memory_budget_bytes = 1
    assert engine.pool.fit() == 1
    assert not len(threads[0].sequence.token_ids)
    report = threads[0].generate(edited(), policy=DEFAULT, max_new_tokens=1).report
    assert report.resumed_from is not None and report.prefix > 0


def test_idle_threads_are_suspended_and_others_are_not(pooled):
    engine = pooled()
    idle, busy, recent = (engine.thread(name) for name in ("idle", "busy", "recent"))
    idle.generate(MESSAGES, max_new_tokens=1)
    stream = busy.stream(MESSAGES, max_new_tokens=20)
    next(stream)
    assert engine.pool.suspend_idle(idle_s=3600.0) == 0
    recent.generate(MESSAGES, max_new_tokens=1)
    assert engine.pool.suspend_idle() == 2
    assert not idle.sequence.is_live and busy.sequence.is_live
    *_, last = stream
    assert last.reply is not None


def test_a_pool_keeps_the_threads_used_last(pooled):
    """An engine had no limit: a thread was kept for every id that was ever used."""
    engine = pooled(max_threads=3)
    held = engine.thread("held")
    held.generate(MESSAGES, max_new_tokens=1)
    for number in range(5):
        engine.thread(f"t-{number}").generate(MESSAGES, max_new_tokens=1)
    assert len(engine.pool) == 3
    assert not held.sequence.is_live and engine.thread("held") is held  # somebody refers to it
    gc.collect()
    ids = {thread.id for thread in engine.pool.threads()}
    assert ids == {"t-3", "t-4", "held"}


def test_threads_that_are_given_up_come_back_from_their_stores(pooled):
    engine = pooled(max_threads=1, store=MemoryStore(), history=MemoryHistoryStore())
    first = engine.thread("first").generate(MESSAGES, max_new_tokens=1)
    engine.thread("second").generate(MESSAGES, max_new_tokens=1)
    engine.flush()
    gc.collect()
    assert [thread.id for thread in engine.pool.threads()] == ["second"]
    report = engine.thread("first").generate(edited(), policy=DEFAULT, max_new_tokens=1).report
    assert report.resumed_from == first.version_id


def test_calls_wait_for_the_pool_and_do_not_fail(pooled):
    """Housekeeping suspends threads at any time; a call that begins then must not be refused."""
    engine = pooled(memory_budget_bytes=1)
    done = threading.Event()

    def tidy():
        while not done.is_set():
            engine.pool.suspend_idle()
            engine.pool.fit()

    def talk(name):
        thread = engine.thread(name)
        for turn in range(6):
            messages = edited(f"Pier {turn}")
            assert thread.generate(messages, policy=DEFAULT, max_new_tokens=2).text is not None

    def talk_all():
        try:
            run_all(*(lambda name=name: talk(name) for name in "abc"))
        finally:
            done.set()

    run_all(tidy, talk_all)


def test_a_stream_that_the_worker_collects_does_not_wait_for_the_worker(pooled):
    """A stream in a reference cycle is closed by the garbage collector in whatever Python thread
    that runs. In the one which stores rows, making room waited for that thread itself."""
    engine = pooled(memory_budget_bytes=1)
    stream = engine.thread("t").stream(MESSAGES, max_new_tokens=20)
    next(stream)
    engine.runtime.offload_worker.submit(stream.close).result(timeout=60)
    engine.flush()
    assert engine.pool.memory()[0] == 0
