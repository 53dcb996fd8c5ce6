"""Conformance tests of history stores.

Subclass, and say how to open an empty store:

    from patchkv_agents.context.stores.conformance import HistoryStoreConformance

    class TestMyStore(HistoryStoreConformance):
        def open_store(self) -> HistoryStore:
            return MyStore(...)

pytest collects the methods named `test_...`; anything else may call them one by one, each on a
fresh instance. They use plain asserts and no test framework. A store that outlives its object
also defines `reopen`, so that it is tested on what it reads back.

Not tested here, since it depends on the storage: several processes at once, killed processes,
damaged or foreign files, and whether forgotten text is gone from the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Thread
from typing import Any

from patchkv_agents.context.edits import Edit, EditKind
from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.context.messages import Message, ToolCall
from patchkv_agents.context.parsing import parse_messages
from patchkv_agents.context.stores.base import HistoryStore
from patchkv_agents.context.versioning.history import ContextHistory
from patchkv_agents.context.versions import ContextVersion, Forgotten, ThreadKey
from patchkv_agents.errors import ContextError, HistoryStoreError

THREAD = ThreadKey("a thread", "a part")


class HistoryStoreConformance:
    """Tests of a history store; see the module."""

    def open_store(self) -> HistoryStore:
        """A new, empty store."""
        raise NotImplementedError("say how to open a store")

    def reopen(self, store: HistoryStore) -> HistoryStore:
        """The same store, opened again; `store` is not used any more."""
        return store

    def test_a_new_store_is_empty(self) -> None:
        """Unknown threads are no error when reading."""
        store = self.open_store()
        assert store.threads() == () and store.related(THREAD) == ()
        assert store.branches(THREAD) == {} and store.version_ids(THREAD) == ()
        assert store.load(THREAD, "v1") is None
        assert store.erase()
        store.close()
        store.close()

    def test_versions_come_back_equal(self) -> None:
        """Every field of versions, edits and messages is kept, and types with them."""
        store = self.open_store()
        versions = [_full_version()]
        versions.append(replace(_version("v2", versions[0]), forgotten=_account()))
        for version in versions:
            _put(store, version)
        store = self.reopen(store)
        for version in versions:
            found = store.load(THREAD, version.id)
            assert found == version, (found, version)
            assert _types(found) == _types(version)
        assert store.version_ids(THREAD) == ("v1", "v2")
        assert store.branches(THREAD) == {"main": "v2"}
        store.close()

    def test_threads_are_apart(self) -> None:
        """Equal names in another namespace, and equal ids in another thread, are others."""
        store = self.open_store()
        keys = [ThreadKey("b"), ThreadKey("b", "c"), ThreadKey("a")]
        for number, key in enumerate(keys):
            _put(store, _version("v1", said=f"text {number}"), thread=key)
        store = self.reopen(store)
        assert store.threads() == tuple(sorted(keys))
        for number, key in enumerate(keys):
            found = store.load(key, "v1")
            assert found is not None and found.messages[0].content == f"text {number}"
            assert store.related(key) == (key,)
        store.close()

    def test_branches_and_a_long_line(self) -> None:
        """100 versions with small changes and a branch in their middle."""
        store = self.open_store()
        versions = [_version("v0", messages=_messages(40))]
        _put(store, versions[0])
        for number in range(1, 100):
            versions.append(_changed(versions[-1], number))
            _put(store, versions[-1])
        side = _version("side", versions[50])
        _put(store, side, branch="side")
        _put(store, versions[20], branch="old")  # a version that is there is not stored again
        store = self.reopen(store)
        for version in (*reversed(versions), side, *versions):
            assert store.load(THREAD, version.id) == version, version.id
        assert store.branches(THREAD) == {"main": "v99", "side": "side", "old": "v20"}
        ids = [version.id for version in versions]
        assert store.version_ids(THREAD) == (*ids, "side")
        store.close()

    def test_a_failed_transaction_leaves_nothing(self) -> None:
        """What was written before the exception is not kept, and the store goes on working."""
        store = self.open_store()
        first = _version("v1")
        try:
            with store.writing(THREAD):
                store.put(THREAD, first, "main")
                raise _StopError
        except _StopError:
            pass
        assert store.threads() == () and store.load(THREAD, "v1") is None
        _put(store, first)
        try:
            with store.writing(THREAD):
                store.put(THREAD, _version("v2", first), "main")
                store.fork(THREAD, ThreadKey("fork"))
                store.rewrite(THREAD, lambda versions: [_silenced(v) for v in versions])
                raise _StopError
        except _StopError:
            pass
        store = self.reopen(store)
        assert store.version_ids(THREAD) == ("v1",)
        assert store.branches(THREAD) == {"main": "v1"}
        assert store.load(THREAD, "v1") == first
        assert store.threads() == (THREAD,)
        _put(store, _version("v2", first))
        assert store.version_ids(THREAD) == ("v1", "v2")
        store.close()

    def test_forks_share_what_was_there(self) -> None:
        """A fork has the versions and branches so far; later ones are each thread's own."""
        store, fork = self.open_store(), ThreadKey("fork")
        first = _version("v1")
        _put(store, first)
        _put(store, first, branch="other")
        with store.writing(THREAD):
            store.fork(THREAD, fork)
        _put(store, _version("v2", first))
        _put(store, _version("v3", first), thread=fork)
        store = self.reopen(store)
        assert store.version_ids(THREAD) == ("v1", "v2")
        assert store.version_ids(fork) == ("v1", "v3")
        assert store.branches(fork) == {"main": "v3", "other": "v1"}
        assert store.branches(THREAD) == {"main": "v2", "other": "v1"}
        assert store.load(fork, "v1") == first
        assert store.load(fork, "v2") is None and store.load(THREAD, "v3") is None
        assert store.related(THREAD) == store.related(fork) == tuple(sorted((THREAD, fork)))
        for source, target in ((THREAD, fork), (ThreadKey("nobody"), ThreadKey("new"))):
            try:
                with store.writing(THREAD):
                    store.fork(source, target)
            except HistoryStoreError:
                continue
            raise AssertionError(f"{source} was forked to {target}")
        store.close()

    def test_rewriting_reaches_all_versions_of_all_forks(self) -> None:
        """`change` is given parents before children, and what it returns is read from then on."""
        store, fork, stranger = self.open_store(), ThreadKey("fork"), ThreadKey("stranger")
        line = [_version("v0", messages=_messages(5))]
        for number in range(1, 40):
            line.append(_changed(line[-1], number))
        for version in line:
            _put(store, version)
        _put(store, line[0], thread=stranger)
        with store.writing(THREAD):
            store.fork(THREAD, fork)
        side = _version("side", line[10])
        _put(store, side, thread=fork)
        given: list[ContextVersion] = []

        def change(versions: Sequence[ContextVersion]) -> Sequence[ContextVersion]:
            given.extend(versions)
            return [_silenced(version) for version in versions]

        with store.writing(THREAD):
            store.rewrite(THREAD, change)
        store.erase()
        assert sorted(v.id for v in given) == sorted(v.id for v in (*line, side))
        places = {version.id: place for place, version in enumerate(given)}
        assert all(places[v.parents[0]] < places[v.id] for v in given if v.parents)
        assert {v.id: v for v in given} == {v.id: v for v in (*line, side)}
        store = self.reopen(store)
        for version in line:
            assert store.load(THREAD, version.id) == _silenced(version)
        assert store.load(fork, "side") == _silenced(side)
        assert store.load(stranger, "v0") == line[0]
        _put(store, _changed(_silenced(line[-1]), 40))
        found = store.load(THREAD, "v40")
        assert found == _changed(_silenced(line[-1]), 40)
        store.close()

    def test_deleting_a_thread(self) -> None:
        """Forks keep the versions that they share; the name may be used again."""
        store, fork = self.open_store(), ThreadKey("fork")
        first = _version("v1")
        _put(store, first)
        with store.writing(THREAD):
            store.fork(THREAD, fork)
        second = _version("v2", first)
        _put(store, second)
        third = _version("v3", first)
        _put(store, third, thread=fork)
        for key in (THREAD, ThreadKey("nobody")):
            with store.writing(key):
                store.delete(key)
        store.erase()
        store = self.reopen(store)
        assert store.threads() == store.related(fork) == (fork,)
        assert store.version_ids(THREAD) == () and store.load(THREAD, "v1") is None
        assert [store.load(fork, name) for name in ("v1", "v2", "v3")] == [first, None, third]
        _put(store, second)
        assert store.load(THREAD, "v2") == second and store.related(THREAD) == (THREAD,)
        store.close()

    def test_several_python_threads(self) -> None:
        """Each commit of each of them is kept, in one line."""
        store = self.open_store()
        failures: list[BaseException] = []

        def work(name: str) -> None:
            try:
                history = ContextHistory(store, thread="shared")
                for number in range(20):
                    history.commit([{"role": "user", "content": f"{name} {number}"}])
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        workers = [Thread(target=work, args=(name,)) for name in "abc"]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not failures, failures
        store = self.reopen(store)
        log = ContextHistory(store, thread="shared").log()
        said = {message.content for version in log for message in version.messages}
        assert said == {f"{name} {number}" for name in "abc" for number in range(20)}
        assert len(log) == 60
        store.close()

    def test_what_cannot_be_written_is_refused(self) -> None:
        """A lone surrogate is no text; nothing is stored."""
        store = self.open_store()
        history = ContextHistory(store, thread="t")
        for bad in ("\ud800", "text \udfff text"):
            try:
                history.commit([Message("user", "fine"), Message("user", bad)])
            except ContextError as error:
                assert "Message 1" in str(error) and "surrogate" in str(error), error
                continue
            raise AssertionError("a lone surrogate was stored")
        assert store.threads() == ()
        store.close()

    def test_large_messages(self) -> None:
        """10 MB in one message."""
        store = self.open_store()
        large = "0123456789" * 1_000_000
        _put(store, _version("v1", said=large))
        store = self.reopen(store)
        found = store.load(THREAD, "v1")
        assert found is not None and found.messages[0].content == large
        store.close()


class _StopError(Exception):
    """Ends a transaction."""


def _put(
    store: HistoryStore,
    version: ContextVersion,
    *,
    thread: ThreadKey = THREAD,
    branch: str = "main",
) -> None:
    with store.writing(thread):
        store.put(thread, version, branch)


def _messages(count: int) -> tuple[Message, ...]:
    return parse_messages([{"role": "user", "content": f"message {i}"} for i in range(count)])


def _version(
    version_id: str,
    parent: ContextVersion | None = None,
    *,
    said: str = "text",
    messages: Sequence[Message] | None = None,
) -> ContextVersion:
    added = messages or parse_messages([{"role": "user", "content": said}])
    before = parent.messages if parent else ()
    return ContextVersion(
        version_id, (*before, *added), parents=(parent.id,) if parent else (), time_s=1.5
    )


def _changed(parent: ContextVersion, number: int) -> ContextVersion:
    """A version in which a message is replaced, one is gone, and one is new."""
    messages = list(parent.messages)
    messages[number % len(messages)] = Message("user", f"changed {number}")
    del messages[number * 7 % len(messages)]
    messages.insert(number * 5 % len(messages), Message("tool", f"new {number}"))
    return ContextVersion(f"v{number}", tuple(messages), parents=(parent.id,))


def _silenced(version: ContextVersion) -> ContextVersion:
    messages = tuple(replace(message, content="-") for message in version.messages)
    return replace(version, messages=messages)


def _account() -> Forgotten:
    return Forgotten(3, ("v1",), (THREAD, ThreadKey("x")), 2, still_shown=(0, 4))


def _full_version() -> ContextVersion:
    """A version that has something in every field, and text that is hard to keep."""
    text = 'tab\t, line\n, quote ", backslash \\, NUL \0, é, 文, 😀, {"a": [1.0]}'
    odd = FrozenJson('{"b":1,  "a": 1.0}')  # spaces as another program writes them
    messages = (
        Message("system", text, name="n"),
        Message(
            "assistant",
            None,
            tool_calls=(
                ToolCall("f", '{"x":  1}', raw=True, id="c1", extra=odd),
                ToolCall("g", '{"y": 2}'),
            ),
            reasoning=text,
            id="m1",
        ),
        Message("tool", (FrozenJson('{"type": "text", "text": "t"}'), odd), tool_call_id="c1"),
        Message("tool", (), tool_call_id="c2", extra=odd, metadata=odd),
        Message("user", ""),
        Message("user", ""),
    )
    edit = Edit(
        id="e1",
        kind=EditKind.REDACT,
        old_indices=(1, 2),
        new_indices=(3,),
        message_ids=("m1",),
        tool_call_ids=("c1", "c2"),
        before_hash="h1",
        after_hash="h2",
        scope="messages",
        where="request",
        declared=True,
        corrected=True,
        forget=True,
        partial=True,
        author="somebody",
        thread="a thread",
        namespace="a part",
        checkpoint_id="checkpoint",
        given_key="key",
        metadata=odd,
        time_s=12.25,
    )
    return ContextVersion(
        "v1",
        messages,
        tools=(odd, FrozenJson('{"name": "f"}')),
        template_args=odd,
        parents=(),
        edits=(edit, Edit("e2", EditKind.APPEND)),
        author="somebody",
        checkpoint_id="checkpoint",
        time_s=1.125,
    )


def _types(value: Any) -> Any:
    """The types inside a value, since 1 == 1.0 == True and a list may look like a tuple."""
    if isinstance(value, tuple):
        return [tuple, *map(_types, value)]
    names = getattr(value, "__dataclass_fields__", None)
    if names is None:
        return type(value)
    return [type(value), *(_types(getattr(value, name)) for name in names)]
