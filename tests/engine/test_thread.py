"""Threads: generation, edits, streams, sampling, and what callers may do wrong."""

from __future__ import annotations

import contextlib
import copy
import threading
import time

import pytest
import torch

from patchkv_agents.context import Edit, EditKind, MemoryHistoryStore
from patchkv_agents.engine import Engine
from patchkv_agents.errors import ContextError, ContextTooLongError, InputError, PatchKVError
from patchkv_agents.recovery import Blocks, RecoveryPolicy, Window

PATCH = RecoveryPolicy("patch", Window(16, tail_tokens=16, block_size=32, rule=Blocks(0.05)))

MESSAGES = [
    {"role": "system", "content": "You answer from the notes."},
    {"role": "user", "content": "Which pier?"},
    {"role": "tool", "content": "The ferry leaves from Pier 4.", "tool_call_id": "call_1"},
    {"role": "tool", "content": "The museum opens at nine. " * 20, "tool_call_id": "call_2"},
    {"role": "user", "content": "So which pier is it?"},
]


def edited(pier="Pier 9, beyond the fuel dock"):
    messages = copy.deepcopy(MESSAGES)
    messages[2]["content"] = f"The ferry leaves from {pier}."
    return messages


def test_an_edit_is_recovered_and_says_that_it_is_not_exact(engine, thread):
    first = thread.generate(MESSAGES, max_new_tokens=3)
    assert first.report.is_exact and first.report.new == first.report.tokens
    thread.suspend()
    assert not thread.sequence.is_live
    report = thread.generate(edited(), policy=PATCH, max_new_tokens=3).report
    assert not report.is_exact and report.restored > 0 and report.policy == "patch"
    assert report.cache_read == report.prefix > 0
    assert report.payload_bytes > 0 and report.resume_ttft_ms > 0
    parts = ("prefix", "new", "window", "attention", "tail", "restored")
    assert sum(getattr(report, part) for part in parts) == report.tokens
    assert [edit.kind for edit in thread.history.head.edits] == [EditKind.REPLACE_TOOL_RESULT]


def test_without_a_policy_recovery_is_exact(engine, thread):
    thread.generate(MESSAGES, max_new_tokens=3)
    reply = thread.generate(edited(), max_new_tokens=3)
    fresh = engine.thread("fresh").generate(edited(), max_new_tokens=3)
    engine.drop("fresh")
    assert reply.report.is_exact and reply.report.restored == 0 and reply.report.prefix > 0
    assert reply.token_ids == fresh.token_ids
    torch.testing.assert_close(reply.first_logits, fresh.first_logits, atol=1e-4, rtol=0)


def test_a_next_turn_keeps_everything_before_it(thread):
    reply = thread.generate(MESSAGES, max_new_tokens=5)
    turn = [
        *MESSAGES,
        {"role": "assistant", "content": reply.text},
        {"role": "user", "content": "Are you sure?"},
    ]
    report = thread.generate(turn, max_new_tokens=2, policy=PATCH).report
    assert report.prefix >= reply.report.tokens
    assert report.is_exact and report.restored == 0


def test_messages_are_copied_on_entry(thread):
    messages = copy.deepcopy(MESSAGES)
    thread.generate(messages, max_new_tokens=1)
    version = thread.history.head
    messages[2]["content"] = "changed by the caller"
    assert version.messages[2].text == MESSAGES[2]["content"]
    thread.generate(messages, max_new_tokens=1)
    assert thread.history.log()[1] is version


def test_forks_share_the_past_and_nothing_else(engine, thread):
    thread.generate(MESSAGES, max_new_tokens=2)
    fork = thread.fork("branch")
    fork.generate(edited(), policy=PATCH, max_new_tokens=2)
    engine.drop("branch")
    assert len(fork.history) == 2 and len(thread.history) == 1
    report = thread.generate(MESSAGES, max_new_tokens=2).report
    assert report.is_exact and report.prefix == report.tokens - 1
    with pytest.raises(InputError, match="exists"):
        engine.thread(thread.id, new=True)


def test_a_fork_that_fails_leaves_nothing_behind(engine, thread, monkeypatch):
    from patchkv_agents.engine.sequence import KVSequence

    thread.generate(MESSAGES, max_new_tokens=2)
    with monkeypatch.context() as patched:
        patched.setattr(KVSequence, "fork", lambda self, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            thread.fork("half")
    assert thread.fork("half").sequence.token_ids.tolist() == thread.sequence.token_ids.tolist()
    engine.drop("half")


@pytest.mark.parametrize("is_suspended", [False, True])
def test_a_thread_begins_with_the_prefix_of_another(engine, thread, is_suspended):
    """Rows that have seen what follows stay out of it, and the other thread keeps all of its."""
    thread.generate(MESSAGES, max_new_tokens=2)
    if is_suspended:
        thread.suspend()
    other = engine.thread("begins alike")
    try:
        common = other.share_prefix(thread, edited())
        assert common == len(other.sequence.token_ids) == len(other.sequence.checkpoint) > 16
        assert not len(other.history)
        with pytest.raises(PatchKVError, match="has state already"):
            other.share_prefix(thread, edited())
        reply = other.generate(edited(), max_new_tokens=2)
        alone = engine.thread("alone").generate(edited(), max_new_tokens=2)
        assert reply.report.is_exact and reply.report.cache_read == common
        torch.testing.assert_close(reply.first_logits, alone.first_logits)
    finally:
        engine.drop("begins alike")
        engine.drop("alone")
    report = thread.generate(MESSAGES, max_new_tokens=2).report
    assert report.is_exact and report.prefix == report.tokens - 1


def test_a_thread_that_must_forget_gives_no_prefix(engine, thread):
    thread.generate(MESSAGES, max_new_tokens=2)
    with contextlib.closing(thread.stream(MESSAGES, max_new_tokens=4)) as answering:
        next(answering)
        thread.clear()  # does so at its next call
        with pytest.raises(PatchKVError, match="answering"):
            engine.thread("new").share_prefix(thread, MESSAGES)
    assert engine.thread("new").share_prefix(thread, MESSAGES) == 0
    engine.drop("new")


def test_a_stream_copies_and_checks_at_the_call(thread):
    messages = copy.deepcopy(MESSAGES)
    stream = thread.stream(messages, max_new_tokens=1)
    messages[2]["content"] = "changed after the call"
    list(stream)
    assert thread.history.head.messages[2].text == MESSAGES[2]["content"]
    with pytest.raises(ContextError):
        thread.stream("nonsense")


def test_a_stream_adds_up_to_the_reply(thread):
    chunks = list(thread.stream(MESSAGES, max_new_tokens=30))
    assert [chunk.reply is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    reply = chunks[-1].reply
    assert "".join(chunk.text for chunk in chunks) == reply.text
    assert reply == reply and len(reply.token_ids) == 30 and reply.finish_reason == "length"


def test_a_stream_that_is_closed_early_leaves_a_usable_thread(engine, thread):
    stream = thread.stream(MESSAGES, max_new_tokens=50)
    next(stream)
    with pytest.raises(PatchKVError, match="answering already"):
        thread.generate(MESSAGES)
    stream.close()
    reply = thread.generate(edited(), max_new_tokens=8)
    fresh = engine.thread("fresh").generate(edited(), max_new_tokens=8)
    engine.drop("fresh")
    assert reply.token_ids == fresh.token_ids


def test_stop_strings_end_the_text_and_are_not_in_it(thread):
    whole = thread.generate(MESSAGES, max_new_tokens=30)
    stop = whole.text[len(whole.text) // 2 :][:3]
    chunks = list(thread.stream(MESSAGES, max_new_tokens=30, stop=["never appears", stop]))
    reply = chunks[-1].reply
    assert reply.text == whole.text[: whole.text.index(stop)]
    assert "".join(chunk.text for chunk in chunks) == reply.text
    assert reply.finish_reason == "stop"
    assert thread.generate(MESSAGES, max_new_tokens=30, stop=stop).text == reply.text


def test_a_seed_repeats_a_sample_and_filters_narrow_it(thread):
    def sample(**options):
        return thread.generate(MESSAGES, max_new_tokens=12, **options).token_ids

    assert sample(temperature=1.5, seed=1) == sample(temperature=1.5, seed=1)
    assert sample(temperature=1.5, seed=1) != sample(temperature=1.5, seed=2)
    greedy = sample()
    assert sample(temperature=2.0, top_k=1, seed=3) == greedy
    assert sample(temperature=2.0, top_p=1e-6, seed=3) == greedy


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": "3"},
        {"max_new_tokens": True},
        {"temperature": "warm"},
        {"temperature": 1e-40},
        {"top_k": 1.5},
        {"seed": "x"},
        {"seed": 2**70},
        {"stop": [1]},
        {"stop": 5},
        {"stop": b"x"},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": -1},
        {"stop": [""]},
        {"max_tokens": 5},
    ],
)
def test_wrong_sampling_arguments_are_refused_before_anything_runs(thread, options):
    with pytest.raises(InputError):
        thread.generate(MESSAGES, **options)
    assert thread.history.head is None


def test_a_context_beyond_the_limit_says_by_how_much(engine, thread):
    thread.generate(MESSAGES, max_new_tokens=2)
    long = [*MESSAGES, {"role": "user", "content": "word " * 900}]
    with pytest.raises(ContextTooLongError, match=r"maximum context length is 700 .*shorten"):
        thread.generate(long)
    assert len(thread.history) == 1  # it never was a context that ran
    report = thread.generate(MESSAGES, max_new_tokens=2).report
    assert report.prefix == report.tokens - 1  # what was there before is still there


def test_generation_ends_at_the_models_limit(engine, thread):
    long = [*MESSAGES, {"role": "user", "content": "word " * 400}]
    reply = thread.generate(long, max_new_tokens=10_000)
    assert reply.finish_reason == "length"
    assert reply.report.tokens + len(reply.token_ids) == engine.max_tokens


@pytest.mark.parametrize("messages", [[], "text", [{"content": "x"}], None])
def test_malformed_messages_are_refused(thread, messages):
    with pytest.raises(ContextError):
        thread.generate(messages)


def test_an_unverified_rendering_is_prefilled_exactly_and_says_why(engine, thread, monkeypatch):
    from dataclasses import replace

    from patchkv_agents.engine import calls as module

    thread.generate(MESSAGES, max_new_tokens=2)
    real = module.render

    def unverified(*args, **kwargs):
        return replace(real(*args, **kwargs), verified=False, reason="spans are guesses")

    monkeypatch.setattr(module, "render", unverified)
    report = thread.generate(edited(), policy=PATCH, max_new_tokens=2).report
    assert report.is_exact and report.restored == 0
    assert "spans are guesses" in report.fallback_reason


def test_an_edit_that_says_forget_is_recovered_exactly(engine, thread):
    """No row that has seen the removed text survives, whatever the policy, and also when a
    further edit follows before the model runs again."""
    thread.generate(MESSAGES, max_new_tokens=2)
    thread.suspend()
    thread.history.replace("call_1", "The ferry leaves from [removed].", forget=True)
    messages = edited("[removed]")
    messages[-1]["content"] = "And now?"
    reply = thread.generate(messages, policy=PATCH, max_new_tokens=2)
    assert reply.report.is_exact and "forget" in reply.report.fallback_reason
    fresh = engine.thread("fresh").generate(messages, max_new_tokens=2)
    engine.drop("fresh")
    torch.testing.assert_close(reply.first_logits, fresh.first_logits, atol=1e-4, rtol=0)
    extents = thread.sequence.checkpoint.extents
    assert sum(extent.length for extent in extents) == reply.report.prefix
    for extent in extents:  # no payload still holds rows from behind the edit
        assert extent.length == extent.payload.rows
    assert list(thread.sequence.versions) == []
    # The next edit, which says nothing, is approximate again.
    again = thread.generate(edited("Pier 3"), policy=PATCH, max_new_tokens=2).report
    assert again.restored > 0 and again.fallback_reason is None


def test_forgetting_reaches_rows_that_saw_an_earlier_form(thread):
    """The text was replaced by an ordinary edit first, and rows behind it restored; they still are
    what they were when they saw it. Then the caller says forget, and changes nothing."""
    thread.generate(MESSAGES, max_new_tokens=2)
    restored = thread.generate(edited(), policy=PATCH, max_new_tokens=2).report
    assert restored.restored > 0
    declared = Edit.declare(EditKind.REPLACE_TOOL_RESULT, old=(2,), new=(2,), forget=True)
    report = thread.generate(edited(), edits=[declared], policy=PATCH, max_new_tokens=2).report
    assert report.is_exact and report.restored == 0 and "forget" in report.fallback_reason
    assert 0 < report.prefix < report.tokens - restored.restored


def test_forgetting_keeps_the_order_of_sampled_answers(thread):
    """Answers of the same text are told apart by their order, which used to be reversed."""
    messages = copy.deepcopy(MESSAGES)
    for n in range(3):
        reply = thread.generate(messages, max_new_tokens=2 + n)
        messages += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "And then?"},
        ]
    before = list(thread._state.replies)
    forget = Edit.declare(EditKind.REDACT, old=(2,), new=(2,), forget=True)
    messages[2]["content"] = "[removed]"
    thread.generate(messages, edits=[forget], max_new_tokens=2)
    assert list(thread._state.replies)[:-1] == before


def test_a_fork_forgets_what_the_other_is_told_to_forget(engine, thread):
    """Also one that is answering at that moment: at its next call then."""
    thread.generate(MESSAGES, max_new_tokens=2)
    forks = [thread.fork("idle"), thread.fork("answering")]
    stream = forks[1].stream(MESSAGES, max_new_tokens=5)
    next(stream)
    thread.history.replace("call_1", "The ferry leaves from [removed].", forget=True)
    thread.generate(edited("[removed]"), policy=PATCH, max_new_tokens=2)
    assert not len(forks[0].sequence.token_ids) and not len(forks[0].sequence.versions)
    assert len(forks[1].sequence.token_ids)
    stream.close()
    for fork in forks:
        report = fork.generate(edited("[removed]"), policy=PATCH, max_new_tokens=2).report
        assert report.is_exact and report.new == report.tokens
        engine.drop(fork.id)


def test_rows_packed_with_loss_are_reported_as_restored(thread):
    """Also the prefix is not called exact then; an exact call computes it again."""
    default = RecoveryPolicy.default()
    thread.generate(MESSAGES, policy=default, max_new_tokens=2)
    thread.suspend("now")
    lossless = 2 * thread.sequence.checkpoint.token_ids.size * 3 * 2 * 8 * 4
    assert thread.sequence.checkpoint.payload_bytes < 0.7 * lossless
    report = thread.generate(edited(), policy=default, max_new_tokens=2).report
    assert not report.is_exact and report.cache_read == 0 and report.restored > 0
    assert sum(report.restored_formats.values()) == report.restored
    exact = thread.generate(edited(), policy=RecoveryPolicy.exact(), max_new_tokens=2).report
    assert exact.is_exact and exact.fallback_reason is None


def test_going_back_in_history_restores_that_version(engine, thread):
    thread.generate(MESSAGES, max_new_tokens=2)
    thread.suspend()
    first = thread.history.head.id
    thread.generate(edited(), policy=PATCH, max_new_tokens=2)
    thread.suspend()
    report = thread.generate(MESSAGES, policy=PATCH, max_new_tokens=2).report
    assert report.resumed_from == first and report.is_exact
    assert report.prefix == report.tokens - 1
    assert report.restored_formats == {"native": report.prefix}


def test_sampled_ids_are_kept_where_encoding_the_answer_gives_others(engine, thread):
    """A random model hardly ever writes a text in the tokens that the tokenizer would choose."""
    first = thread.generate(MESSAGES, max_new_tokens=24, temperature=1.0, seed=3)
    assert list(first.token_ids) != engine.tokenizer.encode(first.text)
    state = thread.sequence.token_ids
    answered = [*MESSAGES, {"role": "assistant", "content": first.text}]
    follow_up = [*answered, {"role": "user", "content": "Sure?"}]
    report = thread.generate(follow_up, max_new_tokens=1).report
    assert report.cache_read == len(state) and report.is_exact
    fork = thread.fork("sampled-fork")
    fork.suspend()
    assert fork.generate(answered, max_new_tokens=1).report.cache_read >= len(state)
    engine.drop("sampled-fork")


def test_threads_of_one_engine_run_from_several_python_threads(engine):
    """Each gets the answer it gets alone."""
    contexts = {f"t{n}": edited(f"Pier {n}") for n in range(4)}

    def answer(name, results):
        thread = engine.thread(name)
        thread.generate(MESSAGES, max_new_tokens=4)
        results[name] = thread.generate(contexts[name], policy=PATCH, max_new_tokens=12).token_ids

    alone, together = {}, {}
    for name in contexts:
        answer(name, alone)
        engine.drop(name)
    workers = [threading.Thread(target=answer, args=(name, together)) for name in contexts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        engine.drop(worker.name)
    assert together == alone
    for name in contexts:
        engine.drop(name)


def test_a_stream_renders_with_the_answers_given_since(engine, thread):
    """It used to render at the call, from the answers so far: ids sampled between the call and the
    first piece were lost, and the text encoded anew."""
    question = [{"role": "user", "content": "Which pier?"}]
    sampling = {"max_new_tokens": 80, "temperature": 3.0, "seed": 5}
    said = engine.thread("other").generate(question, **sampling)
    engine.drop("other")
    assert engine.tokenizer.encode(said.text, add_special_tokens=False) != list(said.token_ids)
    turn = [
        *question,
        {"role": "assistant", "content": said.text},
        {"role": "user", "content": "Sure?"},
    ]
    waiting = thread.stream(turn, max_new_tokens=1)
    first = thread.generate(question, **sampling)
    assert first.token_ids == said.token_ids
    *_, last = waiting
    # The last one's state is computed with the next token.
    assert last.reply.report.cache_read >= first.report.tokens + len(first.token_ids) - 1


class Clock:
    """Stands still but for what is added, and a millisecond at each look."""

    def __init__(self):
        self.now_ns = 7_000_000_000

    def __call__(self):
        self.now_ns += 1_000_000
        return self.now_ns

    def work(self, ms):
        self.now_ns += ms * 1_000_000


PARTS = ("render", "wait", "history", "fetch", "planning", "restore", "recompute", "sampling")


def test_the_parts_of_the_time_to_the_first_token_add_up(engine):
    """The history's commit, the edits' inference and waiting for the thread were in no report."""
    clock = Clock()

    class SlowHistory(MemoryHistoryStore):
        def put(self, *args):
            clock.work(250)
            super().put(*args)

    slow = Engine(engine.adapter.model, engine.tokenizer, history=SlowHistory(), clock_ns=clock)
    thread = slow.thread("t")
    thread.generate(MESSAGES, max_new_tokens=1)
    thread.suspend()
    called_ns = clock()
    clock.work(40)
    stream = thread.stream(edited(), policy=PATCH, max_new_tokens=1, called_ns=called_ns)
    clock.work(1_000)
    *_, last = stream
    report = last.reply.report
    parts = {part: getattr(report, f"{part}_ms") for part in PARTS}
    assert sum(parts.values()) == report.ttft_ms
    assert 1_040 <= parts["wait"] < 1_050 and 250 <= parts["history"] < 260
    assert all(ms >= 1 for ms in parts.values())
    assert report.ttft_ms - 1_290 < 100
    resume_ms = sum(parts[part] for part in ("fetch", "restore", "recompute", "sampling"))
    assert report.resume_ttft_ms == resume_ms


def test_the_time_to_the_first_token_is_the_callers(thread):
    started = time.perf_counter()
    reply = thread.generate(MESSAGES, max_new_tokens=1)
    took_ms = (time.perf_counter() - started) * 1e3
    parts = sum(getattr(reply.report, f"{part}_ms") for part in PARTS)
    assert reply.report.ttft_ms == pytest.approx(parts)
    assert reply.report.resume_ttft_ms < reply.report.ttft_ms <= took_ms
