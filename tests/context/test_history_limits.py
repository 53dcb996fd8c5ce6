"""The work that histories may take, and what they may weigh."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import pytest

from patchkv_agents.context import (
    ContextHistory,
    HistoryStore,
    MemoryHistoryStore,
    SQLiteHistoryStore,
    parse_messages,
)

from ..operations import count_calls

VERSIONS = 1_000
MESSAGES = 200


def snapshots() -> Iterator[list[dict[str, str]]]:
    """A thread of 200 messages in which each version edits one, and every fifth appends a turn."""
    rng = random.Random(0)
    words = [f"{rng.getrandbits(40):x}" for _ in range(2_000)]

    def text() -> str:
        return " ".join(rng.choices(words, k=100))

    messages = [{"role": "system", "content": text(), "id": "system"}]
    messages += [{"role": "user", "content": text(), "id": f"m{i}"} for i in range(1, MESSAGES)]
    yield [dict(message) for message in messages]
    for number in range(1, VERSIONS):
        index = rng.randrange(1, MESSAGES)
        messages[index] = {**messages[index], "content": text()}
        if number % 5 == 0:
            turn = {"role": "user", "content": text(), "id": f"n{number}"}
            messages = [*messages[:20], *messages[21:], turn]
        yield [dict(message) for message in messages]


def committed(store: HistoryStore) -> tuple[ContextHistory, list[int]]:
    """The history, and the calls of every 20th commit."""
    history, calls = ContextHistory(store, thread="t"), []
    for number, messages in enumerate(snapshots()):
        if number % 20 == 1:
            calls.append(count_calls(partial(history.commit, messages)))
        else:
            history.commit(messages)
    return history, calls


def test_a_long_history_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    with SQLiteHistoryStore(path) as store:
        history, calls = committed(store)
        head = history.head
    # A commit costs the same whatever the number of versions: 8,500 calls, 42 a message.
    assert median(calls[-10:]) < 1.2 * median(calls[:10]) and max(calls) < 13_000
    texts = {(m["id"], m["content"]) for messages in snapshots() for m in messages}
    distinct_bytes = sum(len(content) for _, content in texts)
    assert path.stat().st_size < 2.5 * distinct_bytes  # 3.3 MB; unshared, 180 MB

    def reopen() -> None:
        with SQLiteHistoryStore(path) as store:
            assert ContextHistory(store, thread="t").head == head

    assert count_calls(reopen) < 50_000  # 22,700: one version is read, not all 1,000
    with SQLiteHistoryStore(path) as store:
        log = ContextHistory(store, thread="t").log()
    assert len(log) == VERSIONS
    for version, messages in zip(log, [*snapshots()][::-1], strict=True):
        assert [m.content for m in version.messages] == [m["content"] for m in messages]


def test_a_long_history_in_memory() -> None:
    lists = [parse_messages(messages) for messages in islice(snapshots(), 164)]
    history = ContextHistory(MemoryHistoryStore())
    for messages in lists[:64]:
        history.commit(messages)
    tracemalloc.start()
    for messages in lists[64:]:
        history.commit(messages)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # For each version, beside its new messages: 1,870 bytes, for most of which its edits and their
    # hashes are. A list of its own would take 1,640 more.
    assert kept / 100 < 2_600
    versions = history.log()
    objects = {id(message) for version in versions for message in version.messages}
    values = {message for version in versions for message in version.messages}
    assert len(objects) == len(values) > 200


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_large_messages(kind: str, tmp_path: Path) -> None:
    """Two tool results of 10 MB, one of them changed in its middle."""
    store = MemoryHistoryStore() if kind == "memory" else SQLiteHistoryStore(tmp_path / "h.db")
    history = ContextHistory(store)
    large = "".join(f"{number:08x}\n" for number in range(1_100_000))
    result = {"role": "tool", "tool_call_id": "c1", "content": large}
    other = {"role": "tool", "tool_call_id": "c2", "content": large[::-1]}
    history.commit([result, other])
    changed = large[:5_000_000] + "new" + large[5_000_100:]
    versions = []
    edited = [{**result, "content": changed}, other]
    calls = count_calls(lambda: versions.append(history.commit(edited)))
    (version,) = versions
    assert calls < 10_000  # none for each line
    assert [(e.kind.value, e.old_indices) for e in version.edits] == [("replace_tool_result", (0,))]
    assert history.get(version.parents[0]).messages[0].content == large
