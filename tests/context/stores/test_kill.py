"""A writer that is killed loses at most the commit under way, and damages nothing."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from patchkv_agents.context import ContextHistory, SQLiteHistoryStore

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked")

# Imports once, then forks one writer for each line it is given. A writer tells its commits, each
# of which holds a word of its own, and forgets every third word.
NURSERY = """
import os, sys
from patchkv_agents.context import ContextHistory, SQLiteHistoryStore

def write(path, name):
    history = ContextHistory(SQLiteHistoryStore(path), thread="t")
    count = 0
    while True:
        count += 1
        word = f"word-{name}-{count};"
        texts = [f"{word} {index} " + "x" * 300 * index for index in range(6)]
        version = history.commit([{"role": "user", "content": text} for text in texts])
        os.write(1, f"kept {version.id} {word}\\n".encode())
        if count % 3 == 0:
            version = history.redact(secrets=[word])
            os.write(1, f"forgot {version.id} {word}\\n".encode())

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        write(*line.split())
    os.write(1, f"started {child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"ended\\n")
"""


@pytest.fixture
def nursery() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


Told = tuple[str, ...]  # what was done, the version's id, the word


def killed_writer(
    nursery: subprocess.Popen[str], path: Path, name: str, after_s: float
) -> list[Told]:
    """What a writer told before it was killed."""
    assert nursery.stdin is not None and nursery.stdout is not None
    nursery.stdin.write(f"{path} {name}\n")
    nursery.stdin.flush()
    told: list[Told] = []
    started = nursery.stdout.readline().split()  # before the writer's own lines, or behind some
    while started[0] != "started":
        told.append(tuple(started))
        started = nursery.stdout.readline().split()
    time.sleep(after_s)
    os.kill(int(started[1]), signal.SIGKILL)
    for line in nursery.stdout:
        if line == "ended\n":
            return told
        told.append(tuple(line.split()))
    raise AssertionError("the nursery ended")


def check(path: Path, told: list[Told], kills: int) -> None:
    """Everything that was told is there and complete, and little else."""
    with SQLiteHistoryStore(path) as store:  # finishes what was to be forgotten
        history = ContextHistory(store, thread="t")
        ids = history.version_ids()
        acknowledged = [version_id for _, version_id, _ in told]
        assert set(acknowledged) <= set(ids)
        assert len(ids) <= len(acknowledged) + kills
        assert [version.id for version in reversed(history.log())] == list(ids)
        forgotten = {word for what, _, word in told if what == "forgot"}
        for _, version_id, word in told:
            texts = [message.text for message in history.get(version_id).messages]
            shown = texts[0].split(" ")[0]
            # Killed after it had forgotten the word, and before it could tell.
            assert shown == "[removed]" or (shown == word and word not in forgotten)
            assert texts == [f"{shown} {index} " + "x" * 300 * index for index in range(6)]
        assert store.erase()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    content = b"".join(file.read_bytes() for file in path.parent.glob(path.name + "*"))
    assert not any(word.encode() in content for word in forgotten)


def kill_writers(nursery: subprocess.Popen[str], folder: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    told: list[Told] = []
    path, begun = folder / "0.db", 0
    for number in range(kills):
        if number % 4 == 3:  # also while the file is being made
            path, told, begun = folder / f"{number}.db", [], number
        told += killed_writer(nursery, path, str(number), rng.uniform(0, 0.06))
        check(path, told, number + 1 - begun)


def test_20_killed_writers(nursery: subprocess.Popen[str], tmp_path: Path) -> None:
    kill_writers(nursery, tmp_path, 20, seed=1)


@pytest.mark.slow
def test_200_killed_writers(nursery: subprocess.Popen[str], tmp_path: Path) -> None:
    kill_writers(nursery, tmp_path, 200, seed=2)
