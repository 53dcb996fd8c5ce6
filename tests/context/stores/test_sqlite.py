from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from patchkv_agents.context import ContextHistory, EditKind, SQLiteHistoryStore, ThreadKey
from patchkv_agents.errors import ConflictError, HistoryStoreError

from ..samples import agent_messages


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "h.db"


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def make(path: Path, *texts: str) -> None:
    """A file with one thread and its two versions."""
    with SQLiteHistoryStore(path) as store:
        history = ContextHistory(store, thread="t")
        history.commit(user("first", *texts))
        history.commit(user("first", *texts, "second"))


def raw_bytes(path: Path) -> bytes:
    """All that the file system has of it: the file, its log, its index."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob(path.name + "*")))


def snapshot(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}


# Which files are opened


def test_files_that_are_not_histories(path: Path, tmp_path: Path) -> None:
    make(path)
    good = path.read_bytes()
    foreign = tmp_path / "foreign.db"
    with closing(sqlite3.connect(foreign)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("CREATE TABLE t (x)")
    cases = {
        "notes.txt": (b"These are my notes, and they are longer than a header." * 3, "no SQLite"),
        "short.txt": (b"hi", "no SQLite file"),
        "cut.db": (b"SQLite format 3\0" + b"\0" * 20, "no SQLite file"),
        "other.db": (foreign.read_bytes(), "another program's SQLite file"),
        "newer.db": (good[:60] + (2).to_bytes(4, "big") + good[64:], "a newer release .*schema 2"),
        "older.db": (good[:60] + bytes(4) + good[64:], "an older release .*schema 0"),
    }
    for name, (content, problem) in cases.items():
        file = tmp_path / "cases" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        before = snapshot(file)
        for mode in ("rw", "r"):
            with pytest.raises(HistoryStoreError, match=f"{name}.*{problem}.*not changed"):
                SQLiteHistoryStore(file, mode=mode)
        assert snapshot(file) == before
        file.unlink()


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(HistoryStoreError, match="There is no folder .*gone for h.db; make it"):
        SQLiteHistoryStore(tmp_path / "gone" / "h.db")
    with pytest.raises(HistoryStoreError, match="is a folder; name a file in it"):
        SQLiteHistoryStore(tmp_path)
    with pytest.raises(HistoryStoreError, match="There is no file"):
        SQLiteHistoryStore(tmp_path / "h.db", mode="r")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_becomes_a_history(path: Path) -> None:
    path.touch()
    with pytest.raises(HistoryStoreError, match="holds no history and cannot be written"):
        SQLiteHistoryStore(path, mode="r")
    make(path)
    header = path.read_bytes()[:100]
    assert header[68:72] == b"PKVH" and header[60:64] == bytes((0, 0, 0, 1))


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_an_error_or_harmless(path: Path, seed: int) -> None:
    """Overwritten pages are told as such; nothing else is raised, and the file is left as it is."""
    make(path, *(f"message {number} " * 40 for number in range(100)))
    content = bytearray(path.read_bytes())
    for page in range(1 + seed, len(content) // 4096, 3):
        content[page * 4096 : page * 4096 + 2048] = bytes([137 + seed]) * 2048
    path.write_bytes(content)
    failures = 0
    for work in (
        lambda store: ContextHistory(store, thread="t").log(),
        lambda store: ContextHistory(store, thread="t").commit(user("new")),
        lambda store: store.version_ids(ThreadKey("t")),
    ):
        before = path.read_bytes()
        try:
            with SQLiteHistoryStore(path) as store:
                work(store)
        except HistoryStoreError as error:
            assert "damaged" in str(error), error
            assert path.read_bytes() == before
            failures += 1
    assert failures


def test_damaged_records_are_told(path: Path) -> None:
    make(path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE texts SET body = '{\"role\": ' WHERE body LIKE '%second%'")
    with SQLiteHistoryStore(path) as store, pytest.raises(HistoryStoreError, match="damaged"):
        ContextHistory(store, thread="t")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE texts SET body = replace(body, 'second', 'secomd')",
        "UPDATE versions SET record = replace(record, 'append', 'insert')",
        "UPDATE versions SET splices = replace(splices, '[0, 0,', '[0, 1,')",
        "UPDATE versions SET id = replace(id, '-', '+')",
        "UPDATE versions SET base = NULL",
        "DELETE FROM counters",
    ],
)
def test_changed_bytes_are_not_given_out_as_content(path: Path, statement: str) -> None:
    """A flipped bit in a text is no error to SQLite: wrong messages came back as if right."""
    make(path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)
    with pytest.raises(HistoryStoreError, match="damaged"), SQLiteHistoryStore(path) as store:
        ContextHistory(store, thread="t").log()


@pytest.mark.parametrize("change", ["deleted", "replaced", "folder deleted"])
def test_a_file_that_disappears_while_it_is_open(tmp_path: Path, change: str) -> None:
    """SQLite went on writing to the old file, which nobody could open: commits were lost."""
    path = tmp_path / "folder" / "h.db"
    path.parent.mkdir()
    make(path)
    with SQLiteHistoryStore(path) as store:
        history = ContextHistory(store, thread="t")
        if change == "folder deleted":
            shutil.rmtree(path.parent)
        elif change == "deleted":
            path.unlink()
        else:
            make(tmp_path / "other.db")
            os.replace(tmp_path / "other.db", path)
        for act in (lambda: history.commit(user("new")), lambda: history.redact(0)):
            with pytest.raises(HistoryStoreError, match="deleted or replaced while it was open"):
                act()


def test_a_relative_path_means_the_same_file_after_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with SQLiteHistoryStore("h.db") as store:
        history = ContextHistory(store, thread="t")
        history.commit(user("first"))
        monkeypatch.chdir("/")
        history.commit(user("first", "second"))
    assert len(ContextHistory(SQLiteHistoryStore(tmp_path / "h.db"), thread="t")) == 2


# Reading only


def test_reading_only(path: Path) -> None:
    make(path)
    before = path.read_bytes()
    with SQLiteHistoryStore(path, mode="r") as store:
        assert store.read_only
        history = ContextHistory(store, thread="t")
        assert len(history.log()) == 2
        for write in (
            lambda: history.commit(user("new")),
            lambda: history.redact(0),
            lambda: history.branch("side"),
            history.fork,
            history.delete_thread,
        ):
            with pytest.raises(HistoryStoreError, match="opened for reading only"):
                write()
        assert history.finish_forgetting()
    assert path.read_bytes() == before


@contextmanager
def as_somebody_else(folder: Path) -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    """Runs Python in a process to which permissions of files mean something."""
    root = Path(__file__).resolve().parents[3]
    nobody = 65534 if os.getuid() == 0 else None

    def run(code: str) -> subprocess.CompletedProcess[str]:
        prelude = (
            f"import os, sys\nsys.path.insert(0, {str(root)!r})\nimport patchkv_agents.context\n"
        )
        if nobody:
            prelude += f"os.setgid({nobody}); os.setuid({nobody})\n"
        return subprocess.run(
            [sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=60
        )

    yield run
    for file in (folder, *folder.iterdir()):
        file.chmod(0o755)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="permissions are those of POSIX")
def test_files_and_folders_that_cannot_be_written(tmp_path: Path) -> None:
    """Files that may not be written, in a folder that may not either, with and without a log."""
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if os.access(parent, os.W_OK) and parent.owner() != "root" or os.getuid() == 0:
            parent.chmod(parent.stat().st_mode | 0o005)
    folder = tmp_path / "f"
    folder.mkdir()
    path = folder / "h.db"
    make(path)
    read = (
        "from patchkv_agents.context import *\n"
        f"store = SQLiteHistoryStore({str(path)!r})\n"
        "print(store.read_only, len(ContextHistory(store, thread='t').log()))\n"
    )
    with as_somebody_else(folder) as run:
        path.chmod(0o444)
        folder.chmod(0o555)
        done = run(read)
        assert done.stdout.split() == ["True", "2"], done.stderr
        assert [file.name for file in folder.iterdir()] == ["h.db"]
        # A log that could not be merged: its versions must not be overlooked.
        folder.chmod(0o755)
        path.chmod(0o644)
        other = tmp_path / "other"
        other.mkdir()
        with SQLiteHistoryStore(path) as store:
            ContextHistory(store, thread="t").commit(user("third"))
            for name in ("h.db", "h.db-wal"):
                shutil.copy(folder / name, other / name)
                (other / name).chmod(0o444)
        other.chmod(0o555)
        done = run(read.replace(str(path), str(other / "h.db")))
        assert "newest versions are in h.db-wal. Copy both files" in done.stderr, done.stdout
    other.chmod(0o755)


# Several processes


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that has the context package, and prints what the code tells it to."""
    return subprocess.Popen(
        [sys.executable, "-c", "from patchkv_agents.context import *\nimport sys\n" + code]
        + list(arguments),
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def test_several_processes_commit_to_one_branch(path: Path) -> None:
    """All commits are kept, in one line, whoever made them; also while the file is being made."""
    work = (
        "history = ContextHistory(SQLiteHistoryStore(sys.argv[1]), thread='t')\n"
        "for number in range(15):\n"
        "    text = f'{sys.argv[2]} {number}'\n"
        "    print(history.commit([{'role': 'user', 'content': text}]).id)\n"
    )
    workers = [python(work, str(path), name) for name in "abc"]
    told = [worker.communicate(timeout=60)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    with SQLiteHistoryStore(path, mode="r") as store:
        history = ContextHistory(store, thread="t")
        log = history.log()
        assert {version.id for version in log} == {name for names in told for name in names}
        assert len(log) == 45 and len(history.branches()) == 1
        for newer, older in zip(log, log[1:], strict=False):
            assert [edit.old_indices for edit in newer.edits if edit.old_indices] == [(0,)]
            assert newer.parents == (older.id,)


def test_what_another_process_does_is_seen(path: Path) -> None:
    """Cached versions are not given out after another process has rewritten them."""
    make(path)
    with SQLiteHistoryStore(path) as mine, SQLiteHistoryStore(path) as theirs:
        here, there = (ContextHistory(store, thread="t") for store in (mine, theirs))
        assert [m.text for m in here.show("main").messages] == ["first", "second"]
        there.redact(0)
        assert here.head and [m.text for m in here.head.messages] == ["first", "second"]  # as read
        assert [m.text for m in here.log()[0].messages] == ["[removed]", "second"]
        with pytest.raises(ConflictError, match="Call refresh"):
            here.delete(0)
        here.refresh()
        assert [m.text for m in here.show().messages] == ["[removed]", "second"]
        assert all("first" not in m.text for version in here.log() for m in version.messages)
        assert here.delete(0) == there.refresh()
        there.delete_thread()
        with pytest.raises(ConflictError, match="deleted by another"):
            here.commit(user("x"))


def test_a_writer_that_is_too_long(path: Path) -> None:
    make(path)
    with (
        SQLiteHistoryStore(path) as mine,
        SQLiteHistoryStore(path, timeout_s=0.05) as theirs,
        mine.writing(ThreadKey("t")),
    ):
        history = ContextHistory(theirs, thread="t")
        head = history.head
        with pytest.raises(HistoryStoreError, match="another process .* for too long; try again"):
            history.commit(user("new"))
        assert history.head == head


def test_a_full_disk(path: Path) -> None:
    """The commit fails and leaves nothing; with room again, it works."""
    with SQLiteHistoryStore(path) as store:
        history = ContextHistory(store, thread="t")
        head = history.commit(agent_messages())
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
        large = [*agent_messages(), *user("x" * 100_000)]
        with pytest.raises(HistoryStoreError, match="disk is full. Nothing was changed"):
            history.commit(large)
        assert history.head is head and history.version_ids() == (head.id,)
        assert history.refresh() == head
        store._db.execute("PRAGMA max_page_count = 1000000")
        version = history.commit(large)
        assert version.parents == (head.id,)
    with SQLiteHistoryStore(path) as store:
        assert ContextHistory(store, thread="t").head == version
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_closed_store(path: Path) -> None:
    make(path)
    store = SQLiteHistoryStore(path)
    history = ContextHistory(store, thread="t")
    store.close()
    with pytest.raises(HistoryStoreError, match="was closed; open it again"):
        history.commit(user("x"))


def test_sharing(path: Path) -> None:
    """Texts are stored once for a thread and its forks, and versions as their changes."""
    with SQLiteHistoryStore(path) as store:
        history = ContextHistory(store, thread="t")
        texts = [f"message {number}" for number in range(200)]
        history.commit(user(*texts))
        for number in range(99):
            texts[number * 7 % 200] = f"changed {number}"
            history.commit(user(*texts))
        history.fork("fork").commit(user(*texts, "more"))
        texts_stored = store._db.execute("SELECT count(*) FROM texts WHERE body LIKE '%user%'")
        assert texts_stored.fetchone() == (300,)
        rows = store._db.execute("SELECT splices FROM versions").fetchall()
        assert len(rows) == 101
        assert sum(len(row[0]) > 200 for row in rows) == 4  # in full: the first, then each 33rd


# Forgetting, in the bytes of the files

FORGOTTEN = 'Ada\'s code: "Zebra-4711" – é\n'


def written(text: str) -> list[bytes]:
    """How a text may stand in the files."""
    once = [json.dumps(text, ensure_ascii=plain)[1:-1] for plain in (True, False)]
    twice = [json.dumps(each, ensure_ascii=plain)[1:-1] for each in once for plain in (True, False)]
    return [each.encode() for each in {text, *once, *twice}]


def is_in(text: str, content: bytes) -> bool:
    return any(each in content for each in written(text))


def commit_forgotten(store: SQLiteHistoryStore) -> ContextHistory:
    """Texts among many others, in several forms."""
    history = ContextHistory(store, thread="t")
    messages: list[dict[str, Any]] = agent_messages()
    messages[3]["content"] = FORGOTTEN
    messages[4]["tool_calls"][0]["function"]["arguments"] = json.dumps({"x": FORGOTTEN})
    messages[5]["content"] = [{"type": "text", "text": FORGOTTEN}]
    history.commit(messages)
    for number in range(60):
        messages.append({"role": "user", "content": f"{FORGOTTEN} {number}" * (number % 7)})
        messages.append({"role": "assistant", "content": f"other text {number} " * 50})
        history.commit(messages)
    return history


def status(store: SQLiteHistoryStore) -> str:
    forgotten = ContextHistory(store, thread="t").show().forgotten
    assert forgotten is not None
    return forgotten.status


def test_forgotten_text_is_in_no_file(path: Path) -> None:
    with SQLiteHistoryStore(path) as store:
        history = commit_forgotten(store)
        digests = [row[0] for row in store._db.execute("SELECT digest FROM texts")]
        hashes = {
            message.content_hash
            for version in history.log()
            for message in version.messages
            if is_in(FORGOTTEN, repr(message.to_openai()).encode())
            or FORGOTTEN in (message.text, message.tool_calls and FORGOTTEN)
        }
        assert is_in(FORGOTTEN, raw_bytes(path)) and hashes
        version = history.redact(["c1", "c2"], "gone", secrets=[FORGOTTEN.strip()])
        assert version.forgotten is not None and version.forgotten.status == "erased"
        content = raw_bytes(path)
        assert not is_in(FORGOTTEN.strip(), content) and b"Zebra-4711" not in content
        assert not any(each.encode() in content for each in hashes)
        left = [row[0] for row in store._db.execute("SELECT digest FROM texts")]
        assert not any(digest in content for digest in set(digests) - set(left))
        assert b"other text 59" in content
        assert len(history.log()) == 62
    assert b"Zebra-4711" not in raw_bytes(path)


def test_forgetting_while_another_reads(path: Path) -> None:
    """A reader holds the log: the text is gone from all versions, but not from the files yet."""
    with SQLiteHistoryStore(path) as store, SQLiteHistoryStore(path) as reader:
        history = commit_forgotten(store)
        reader._db.execute("BEGIN")
        reader._db.execute("SELECT count(*) FROM texts").fetchone()
        version = history.redact(3, "gone", secrets=["Zebra-4711"])
        assert version.forgotten is not None and version.forgotten.status == "pending"
        assert b"Zebra-4711" in raw_bytes(path)
        assert not any("Zebra-4711" in m.text for v in history.log() for m in v.messages)
        assert not history.finish_forgetting()
        reader._db.execute("ROLLBACK")
        assert history.finish_forgetting()
        assert b"Zebra-4711" not in raw_bytes(path)
        assert status(store) == "erased"
        assert history.finish_forgetting()


def test_forgetting_is_finished_when_the_file_is_opened_again(path: Path) -> None:
    """As after the process was killed between the commit and the cleaning of the files."""
    with SQLiteHistoryStore(path) as store:
        history = commit_forgotten(store)
        store.erase = lambda: False  # type: ignore[method-assign]
        version = history.redact(3, "gone", secrets=["Zebra-4711"])
        assert version.forgotten is not None and version.forgotten.status == "pending"
        with SQLiteHistoryStore(path, mode="r") as reading:
            assert not reading.erase()
        copy = path.with_name("copy.db")
        shutil.copy(path, copy)
        shutil.copy(f"{path}-wal", f"{copy}-wal")
    assert b"Zebra-4711" in raw_bytes(copy)
    with SQLiteHistoryStore(copy) as store:
        assert b"Zebra-4711" not in raw_bytes(copy)
        assert status(store) == "erased"


def test_two_processes_forget_at_once(path: Path) -> None:
    """What the other one removed while the files were cleaned is not taken for cleaned."""
    with SQLiteHistoryStore(path) as mine, SQLiteHistoryStore(path) as theirs:
        history = commit_forgotten(mine)
        theirs.erase = lambda: False  # type: ignore[method-assign]
        empty_log = mine._empty_log

        def then_another_forgets() -> bool:
            assert empty_log()
            ContextHistory(theirs, thread="t").redact(secrets=["Zebra-4711"])
            return True

        mine._empty_log = then_another_forgets  # type: ignore[method-assign]
        history.redact("m7", "gone")
        assert status(mine) == "pending"
        mine._empty_log = empty_log  # type: ignore[method-assign]
        assert history.finish_forgetting() and status(mine) == "erased"
        assert b"Zebra-4711" not in raw_bytes(path)


def test_a_deleted_thread_is_in_no_file(path: Path) -> None:
    with SQLiteHistoryStore(path) as store:
        commit_forgotten(store).delete_thread()
        other = ContextHistory(store, thread="other")
        other.commit(user("kept"))
        assert b"Zebra-4711" not in raw_bytes(path) and b"kept" in raw_bytes(path)


def test_reading_goes_on_during_commits(path: Path) -> None:
    """One state for each call: a version that is being loaded is not half of another."""
    with SQLiteHistoryStore(path) as store, SQLiteHistoryStore(path) as other:
        history = ContextHistory(store, thread="t")
        history.commit(user(*(f"m{number}" for number in range(50))))
        stop = threading.Event()
        failures: list[BaseException] = []

        def read() -> None:
            try:
                while not stop.is_set():
                    for version in ContextHistory(other, thread="t").log():
                        assert len(version.messages) == 50
            except BaseException as error:
                failures.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(30):
            history.replace(number, f"new {number}", kind=EditKind.OTHER)
            if number % 10 == 0:
                history.redact(number)
        stop.set()
        reader.join()
        assert not failures, failures
