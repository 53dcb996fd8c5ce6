"""Threads whose state lies in a store beyond this process: resumed elsewhere, forgotten, broken."""

from __future__ import annotations

import copy
import logging
import time
from dataclasses import replace

import pytest
import torch

from patchkv_agents.backends.transformers.fingerprint import model_fingerprint
from patchkv_agents.checkpoint.stores import MemoryStore, open_store
from patchkv_agents.context import (
    ContextHistory,
    Edit,
    EditKind,
    MemoryHistoryStore,
    SQLiteHistoryStore,
    ThreadKey,
)
from patchkv_agents.engine import Engine
from patchkv_agents.errors import CheckpointError, HistoryStoreError
from patchkv_agents.recovery import Blocks, RecoveryPolicy, Window

from .models import tiny_engine
from .test_thread import MESSAGES, edited

PATCH = RecoveryPolicy("patch", Window(16, tail_tokens=16, block_size=32, rule=Blocks(0.05)))


@pytest.fixture(scope="module")
def plain(smollm2_tokenizer):
    return tiny_engine(smollm2_tokenizer, max_tokens=700)


@pytest.fixture
def engine_on(plain):
    """Engines on one model, as in several processes."""

    def engine(store, **options):
        made = Engine(plain.adapter.model, plain.tokenizer, store=store, **options)
        made.runtime.fingerprint = plain.fingerprint  # computed once
        return made

    return engine


def suspended(engine, name="t", messages=MESSAGES):
    """A thread whose suspend has reached the store."""
    thread = engine.thread(name)
    thread.generate(messages, max_new_tokens=2)
    thread.suspend()
    engine.flush()
    return thread


class Broken(MemoryStore):
    """Fails at the calls named."""

    def __init__(self, *calls):
        super().__init__()
        for call in calls:
            setattr(self, call, self._fail)

    def _fail(self, *args, **options):
        raise CheckpointError("the store is away")


def test_another_engine_resumes_the_thread(plain, engine_on):
    store = MemoryStore()
    first = suspended(engine_on(store))
    other = engine_on(store).thread("t")
    report = other.generate(edited(), policy=PATCH, max_new_tokens=2).report
    assert report.resumed_from == first.history.head.id and report.fallback_reason is None
    assert report.prefix > 0 and report.restored > 0 and report.fetch_ms > 0
    exact = engine_on(store).thread("t").generate(edited(), max_new_tokens=2)
    expected = plain.thread("fresh").generate(edited(), max_new_tokens=2)
    plain.drop("fresh")
    torch.testing.assert_close(exact.first_logits, expected.first_logits, atol=1e-4, rtol=0)


def test_a_folder_is_enough_to_go_on_elsewhere_and_damage_is_noticed(plain, engine_on, tmp_path):
    """Rows stream in while the model computes. Then a byte of the largest file is flipped."""
    first = suspended(engine_on(open_store(tmp_path)))
    report = engine_on(open_store(tmp_path)).thread("t").generate(MESSAGES, max_new_tokens=2).report
    assert report.resumed_from == first.history.head.id
    assert report.prefix == report.tokens - 1 and report.restored_formats["native"] > 0

    largest = max(tmp_path.rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    reply = engine_on(open_store(tmp_path)).thread("t").generate(MESSAGES, max_new_tokens=2)
    assert "could not be read" in reply.report.fallback_reason
    assert reply.report.is_exact and reply.report.new == reply.report.tokens
    expected = plain.thread("fresh").generate(MESSAGES, max_new_tokens=2)
    plain.drop("fresh")
    assert reply.token_ids == expected.token_ids
    torch.testing.assert_close(reply.first_logits, expected.first_logits, atol=1e-4, rtol=0)


def test_a_damaged_manifest_is_noticed_too(engine_on, tmp_path):
    """It used to be left out when versions were listed, and so taken for absent, without a word."""
    rows, file = tmp_path / "rows", tmp_path / "history.db"
    suspended(engine_on(open_store(rows), history=SQLiteHistoryStore(file)))
    [manifest] = rows.rglob("manifest-*")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    thread = engine_on(open_store(rows), history=SQLiteHistoryStore(file)).thread("t")
    report = thread.generate(MESSAGES, max_new_tokens=2).report
    assert "manifest of a stored checkpoint is damaged" in report.fallback_reason
    assert report.is_exact and report.new == report.tokens


def test_a_version_from_the_store_can_be_gone_back_to(engine_on):
    store = MemoryStore()
    first = suspended(engine_on(store))
    thread = engine_on(store).thread("t")
    assert thread.generate(edited(), policy=PATCH, max_new_tokens=2).report.restored > 0
    thread.suspend()
    report = thread.generate(MESSAGES, policy=PATCH, max_new_tokens=2).report
    assert report.resumed_from == first.history.head.id and report.is_exact
    assert report.prefix == report.tokens - 1


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"thread": "u"}, {"namespace": "sub"}])
def test_nobody_else_is_answered_from_it(engine_on, other):
    store = MemoryStore()
    suspended(engine_on(store, tenant="a"))
    engine = engine_on(store, tenant=other.get("tenant", "a"))
    thread = engine.thread(other.get("thread", "t"), namespace=other.get("namespace", ""))
    report = thread.generate(MESSAGES, max_new_tokens=2).report
    assert report.new == report.tokens and report.resumed_from is None


@pytest.mark.parametrize("call", ["versions", "open"])
def test_a_store_that_cannot_be_read_is_done_without(engine_on, call):
    store = MemoryStore()
    suspended(engine_on(store))
    broken = Broken(call)
    broken._checkpoints = store._checkpoints
    reply = engine_on(broken).thread("t").generate(MESSAGES, policy=PATCH, max_new_tokens=2)
    assert reply.report.new == reply.report.tokens and reply.report.is_exact
    assert "the store is away" in reply.report.fallback_reason


def test_a_store_that_cannot_be_written_costs_nothing_but_the_copy(engine_on, caplog):
    with caplog.at_level(logging.WARNING):
        thread = suspended(engine_on(Broken("save")))
    assert "the store is away" in caplog.text
    report = thread.generate(MESSAGES, max_new_tokens=2).report
    assert report.prefix == report.tokens - 1 and report.fallback_reason is None


def test_forgetting_reaches_the_store(engine_on):
    """Also what another process stored, and also where the store could not do it at first."""
    store = MemoryStore()
    engine = engine_on(store)
    thread = suspended(engine)
    saw = thread.history.head.id
    thread.history.replace("call_1", "The ferry leaves from [removed].", forget=True)
    messages = copy.deepcopy(edited("[removed]"))

    real, store.delete = store.delete, Broken("delete").delete
    report = thread.generate(messages, max_new_tokens=2).report
    assert "not deleted yet: the store is away" in report.fallback_reason
    assert engine.stores.checkpoints(ThreadKey("t")).versions() == [saw]
    store.delete = real
    assert thread.generate(messages, max_new_tokens=2).report.fallback_reason is None
    assert engine.stores.checkpoints(ThreadKey("t")).versions() == []
    thread.suspend()
    assert engine.stores.checkpoints(ThreadKey("t")).versions() == [thread.history.head.id]
    assert thread.generate(messages, max_new_tokens=2).report.prefix > 0


class Undeletable(MemoryStore):
    """Whose `delete` fails as long as it is away."""

    is_away = True

    def delete(self, key):
        if self.is_away:
            raise CheckpointError("the store is away")
        super().delete(key)


def assert_untouched(reply, plain, messages, tokenizer=None):
    """An answer that was computed from nothing that the first one left behind."""
    assert reply.report.new == reply.report.tokens and reply.report.resumed_from is None
    engine = plain if tokenizer is None else Engine(plain.adapter.model, tokenizer)
    expected = engine.thread("untouched").generate(messages, max_new_tokens=1)
    engine.drop("untouched")
    torch.testing.assert_close(reply.first_logits, expected.first_logits, atol=1e-4, rtol=0)


def test_a_pending_forget_holds_in_a_fresh_process(plain, engine_on, tmp_path):
    """The version that saw the secret used to be fetched, and its later rows went into the
    answer: only a reason in the report said that the store had not deleted it."""
    store, file = Undeletable(), tmp_path / "history.db"
    first = suspended(engine_on(store, history=SQLiteHistoryStore(file)))
    saw = first.history.head.id
    first.history.replace("call_1", "The ferry leaves from [removed].", forget=True)
    messages = edited("[removed]")
    engine = engine_on(store, history=SQLiteHistoryStore(file))
    for turn in range(2):
        thread = engine.thread("t")
        reply = thread.generate(messages, policy=PATCH, max_new_tokens=1)
        assert "not deleted yet: the store is away" in reply.report.fallback_reason
        if turn == 0:
            assert_untouched(reply, plain, messages)
        thread.suspend()
    assert reply.report.cache_read == reply.report.tokens - 1  # what came after it is used
    engine.flush()
    again = engine_on(store, history=SQLiteHistoryStore(file)).thread("t")
    reply = again.generate(messages, policy=PATCH, max_new_tokens=1)
    assert reply.report.is_exact and reply.report.resumed_from == thread.history.head.id
    store.is_away = False
    assert saw in engine.stores.checkpoints(ThreadKey("t")).versions()
    assert again.generate(messages, max_new_tokens=1).report.fallback_reason is None
    assert saw not in engine.stores.checkpoints(ThreadKey("t")).versions()


def test_a_pending_forget_holds_where_no_token_is_left(plain, engine_on, smollm2_tokenizer):
    """The thread's own state goes from the first token on, so it has none, and used to fetch."""
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    engine = Engine(plain.adapter.model, tokenizer, store=Undeletable())
    messages = [{"role": "user", "content": "A secret. " + "The museum opens at nine. " * 20}]
    thread = suspended(engine, messages=messages)
    removed = "Removed. " + "The museum opens at nine. " * 20
    thread.history.replace(0, removed, kind=EditKind.REDACT, forget=True)
    messages = [{"role": "user", "content": removed}]
    reply = thread.generate(messages, policy=PATCH, max_new_tokens=1)
    assert "not deleted yet" in reply.report.fallback_reason
    assert_untouched(reply, plain, messages, tokenizer)


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "in a fresh process"])
def test_a_pending_forget_holds_for_forks(plain, engine_on, tmp_path, is_open):
    """A fork shows the same text no more. Its stored rows saw it, and used to be fetched where
    the store could not delete them."""
    store, file = Undeletable(), tmp_path / "history.db"
    engine = engine_on(store, history=SQLiteHistoryStore(file))
    thread = suspended(engine)
    fork = thread.fork("copy")
    fork.generate(MESSAGES, max_new_tokens=2)
    fork.suspend()
    engine.flush()
    thread.history.replace("call_1", "[removed]", forget=True)
    messages = copy.deepcopy(MESSAGES)
    messages[2]["content"] = "[removed]"
    thread.generate(messages, max_new_tokens=1)
    if not is_open:
        engine = engine_on(store, history=SQLiteHistoryStore(file))
        fork = engine.thread("copy")
    reply = fork.generate(messages, policy=PATCH, max_new_tokens=1)
    assert_untouched(reply, plain, messages)


def test_a_forget_holds_on_another_branch_too(engine_on):
    """Going on with a branch that was left before, a fresh process used to fetch its rows."""
    store, histories = Undeletable(), MemoryHistoryStore()
    thread = suspended(engine_on(store, history=histories))
    saw = thread.history.head
    thread.history.replace("call_1", "[removed]", forget=True)
    messages = copy.deepcopy(MESSAGES)
    messages[2]["content"] = "[removed]"
    thread.generate(messages, max_new_tokens=1)
    other = [*messages, {"role": "user", "content": "Another way."}]
    fresh = engine_on(store, history=histories).thread("t")
    reply = fresh.generate(other, parent=saw.id, policy=PATCH, max_new_tokens=1)
    assert fresh.history.head.parents == (saw.id,)
    assert reply.report.resumed_from is None and reply.report.new == reply.report.tokens


def test_every_fork_forgets_though_the_store_fails_at_the_first(engine_on):
    engine = engine_on(Undeletable())
    thread = suspended(engine)
    forks = [thread.fork(f"fork-{number}") for number in range(3)]
    for fork in forks:
        fork.generate(MESSAGES, max_new_tokens=2)
        fork.suspend()
    engine.flush()
    thread.history.replace("call_1", "[removed]", forget=True)
    messages = copy.deepcopy(MESSAGES)
    messages[2]["content"] = "[removed]"
    thread.generate(messages, max_new_tokens=1)
    assert not any(len(fork.sequence.token_ids) for fork in forks)
    assert not any(len(fork.sequence.versions) for fork in forks)
    # Tried again at the next call, without taking what the forks have computed since.
    forks[0].generate(messages, max_new_tokens=1)
    thread.generate(messages, max_new_tokens=1)
    assert len(forks[0].sequence.token_ids)


def test_forgetting_reaches_what_nobody_has_open(engine_on, tmp_path):
    """Rows of a fork that another process made, rows that another model computed, and parts whose
    writer died before it wrote a manifest used to stay in the store."""
    rows, file = open_store(tmp_path / "rows"), tmp_path / "history.db"
    writer = engine_on(rows, history=SQLiteHistoryStore(file))
    fork = suspended(writer).fork("copy")
    fork.generate(MESSAGES, max_new_tokens=3)
    fork.suspend()
    other_model = engine_on(rows, history=SQLiteHistoryStore(file))
    other_model.runtime.fingerprint = "another model"
    suspended(other_model)
    writer.stores.checkpoints(ThreadKey("copy")).versions()
    assert rows.stats().checkpoints == 3
    for manifest in (tmp_path / "rows").rglob("manifest-*"):
        if "copy" not in manifest.read_text():
            manifest.unlink()

    engine = engine_on(rows, history=SQLiteHistoryStore(file))
    forget = Edit.declare(EditKind.REDACT, old=(2,), new=(2,), forget=True)
    thread = engine.thread("t")
    thread.generate(edited("[removed]"), edits=[forget], max_new_tokens=2)
    assert rows.stats().stored_bytes == 0
    # What is stored from now on stays, whoever obeys the same edit later.
    thread.suspend()
    fork = engine.thread("copy")
    fork.generate(edited("[removed]"), max_new_tokens=2)
    fork.suspend()
    engine.stores.checkpoints(ThreadKey("copy")).versions()
    later = engine_on(rows, history=SQLiteHistoryStore(file)).thread("t")
    assert later.generate(edited("[removed]"), max_new_tokens=2).report.resumed_from
    assert rows.stats().checkpoints == 2


def test_rows_of_another_model_are_forgotten(engine_on):
    store = MemoryStore()
    engine = engine_on(store)
    saw = suspended(engine).history.head.id
    [(key, checkpoint)] = store._checkpoints.items()
    store.save(replace(key, fingerprint="another model"), checkpoint)
    engine.thread("t").history.replace("call_1", "[removed]", forget=True)
    messages = copy.deepcopy(MESSAGES)
    messages[2]["content"] = "[removed]"
    engine.thread("t").generate(messages, max_new_tokens=2)
    assert saw == key.version and store.stats().checkpoints == 0


def test_a_fork_that_is_to_forget_while_it_answers_stores_nothing(engine_on):
    """Its suspend used to store the rows, to be deleted at a next call that may never come."""
    engine = engine_on(MemoryStore())
    thread = suspended(engine)
    fork = thread.fork("copy")
    stream = fork.stream(MESSAGES, max_new_tokens=5)
    next(stream)
    thread.history.replace("call_1", "The ferry leaves from [removed].", forget=True)
    thread.generate(edited("[removed]"), max_new_tokens=2)
    stream.close()
    fork.suspend()
    assert engine.stores.checkpoints(ThreadKey("copy")).versions() == []
    assert not len(fork.sequence.token_ids) and not len(fork.sequence.versions)


def test_a_closed_store_costs_no_call(engine_on, tmp_path):
    store = open_store(tmp_path)
    first = suspended(engine_on(store))
    store.close()
    report = engine_on(store).thread("t").generate(MESSAGES, max_new_tokens=2).report
    assert report.resumed_from == first.history.head.id and report.fallback_reason is None


def test_dropping_a_thread_deletes_it_in_the_store_only_if_asked(engine_on):
    store = MemoryStore()
    engine = engine_on(store)
    suspended(engine)
    engine.drop("t")
    assert store.stats().checkpoints == 1
    engine.drop("t", delete=True)
    assert store.stats().checkpoints == 0


def test_the_fingerprint_names_the_model_and_nothing_else(plain, smollm2_tokenizer):
    """The same weights give the same name, whatever was done with the tokenizer; one changed
    weight of a small tensor, another dtype or another vocabulary gives another."""
    model = plain.adapter.model
    name = model_fingerprint(model, smollm2_tokenizer)
    padded = copy.deepcopy(smollm2_tokenizer)
    padded(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert model_fingerprint(copy.deepcopy(model), padded) == name
    changed = copy.deepcopy(model)
    changed.model.norm.weight.data[3] += 1e-3
    assert model_fingerprint(changed, smollm2_tokenizer) != name
    assert model_fingerprint(copy.deepcopy(model).bfloat16(), smollm2_tokenizer) != name
    padded.add_tokens(["<another>"])
    assert model_fingerprint(model, padded) != name


def test_history_and_rows_together_carry_a_thread_to_another_engine(engine_on, tmp_path):
    """The second engine takes up both; a fork, a forget and a deletion reach the files."""
    rows, file = open_store(tmp_path / "rows"), tmp_path / "history.db"
    first = suspended(engine_on(rows, history=SQLiteHistoryStore(file)))
    engine = engine_on(rows, history=SQLiteHistoryStore(file))
    thread = engine.thread("t")
    assert thread.history.head.id == first.history.head.id
    report = thread.generate(edited(), policy=PATCH, max_new_tokens=2).report
    assert report.resumed_from == first.history.head.id and report.restored > 0
    [edit] = thread.history.log()[0].edits
    assert edit.kind is EditKind.REPLACE_TOOL_RESULT and edit.old_index == 2

    fork = thread.fork("copy")
    assert fork.history.head.id == thread.history.head.id
    with pytest.raises(HistoryStoreError, match="copy"):
        engine_on(rows, history=SQLiteHistoryStore(file)).thread("t").fork("copy")

    forget = Edit.declare(EditKind.REDACT, old=(2,), new=(2,), forget=True)
    report = thread.generate(edited("[removed]"), edits=[forget], max_new_tokens=2).report
    assert "forget" in report.fallback_reason and report.is_exact
    for name in ("Pier 4", "Pier 9"):
        assert name.encode() not in b"".join(p.read_bytes() for p in tmp_path.glob("history.db*"))

    engine.drop("t", delete=True)
    again = ContextHistory(SQLiteHistoryStore(file), thread="t")
    assert again.head is None and not engine.stores.checkpoints(ThreadKey("t")).versions()
    assert ContextHistory(SQLiteHistoryStore(file), thread="copy").head is not None


def test_flush_waits_for_what_is_being_stored(engine_on):
    """A store that takes its time: without the wait another engine would find nothing yet."""
    saved = []

    class Slow(MemoryStore):
        def save(self, key, checkpoint):
            time.sleep(0.3)
            super().save(key, checkpoint)
            saved.append(key.version)

    engine = engine_on(Slow())
    thread = engine.thread("t")
    thread.generate(MESSAGES, max_new_tokens=2)
    thread.suspend()
    assert not saved
    engine.flush()
    assert saved == [thread.history.head.id]
