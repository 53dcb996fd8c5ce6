"""The engine's threads that chat models use: which one answers a call, one call at a time."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from patchkv_agents.errors import PatchKVError
from patchkv_langchain.conversations import (
    Conversation,
    Relation,
    chosen,
    common_beginning,
    named_relation,
    relation,
)
from patchkv_langchain.graph_steps import GraphStep, StepVersions

if TYPE_CHECKING:
    from patchkv_agents.context import FrozenJson, Message
    from patchkv_agents.engine import Engine, Thread

MAX_CONVERSATIONS = 1024
"""Conversations that are remembered; which of their states are kept is up to the engine's pool."""
_MAX_ANSWERS = 8  # of a conversation that are remembered

_Key = tuple[str, str]  # id and namespace of a thread of the engine


class _Slot:
    """What is known of one of the engine's threads. Guarded by the table's lock.

    Attributes:
        key: of the engine's thread.
        conversation: that it belongs to. Several may share a name: tasks side by side, and
            subagents that are called again.
        lock: held by the call that uses the thread.
        owner: the thread of execution that holds the lock.
        waiting: calls that use the thread or wait for it.
        step: of the last call.
        pending: messages of the last call.
        context: messages that were answered last.
        answers: the newest ones.
        versions: by the steps that made them.
    """

    def __init__(self, key: _Key, conversation: Conversation) -> None:
        self.key = key
        self.conversation = conversation
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.waiting = 0
        self.step: GraphStep | None = None
        self.pending: Sequence[Message] = ()
        self.context: Sequence[Message] = ()
        self.answers: deque[Message] = deque(maxlen=_MAX_ANSWERS)
        self.versions = StepVersions()

    @property
    def is_busy(self) -> bool:
        """Whether a call uses the thread or waits for it."""
        return self.waiting > 0

    def relation(self, messages: Sequence[Message]) -> Relation:
        """What a context is to this conversation."""
        if self.conversation.is_named:
            return named_relation(self.context, messages)
        return relation(self.context, messages, self.answers)


class Turn:
    """A thread of the engine while one call uses it.

    Attributes:
        thread: of the engine.
        versions: that were made in it, by the steps of graphs.
    """

    def __init__(
        self, thread: Thread, slot: _Slot, messages: Sequence[Message], step: GraphStep | None
    ) -> None:
        self.thread = thread
        self.versions = slot.versions
        self._slot = slot
        self._messages, self._step = messages, step

    def placed(self) -> None:
        """The messages of the call have become a version."""
        head = self.thread.history.head
        self._slot.context = self._messages
        if self._step is not None and head is not None:
            self.versions.note(self._step, head.id)

    def answered(self, answer: Message) -> None:
        """The call has its answer."""
        self._slot.answers.append(answer)


class ChatThreads:
    """The threads of one engine that chat models use. One call at a time has the turn on each.

    Args:
        engine: that runs them.
        limit: conversations to remember.
    """

    def __init__(self, engine: Engine, limit: int = MAX_CONVERSATIONS) -> None:
        self._engine_ref = ref(engine)  # the tables of engines must not keep these alive
        self._limit = limit
        self._slots: OrderedDict[_Key, _Slot] = OrderedDict()  # used longest ago first
        self._lock = threading.Lock()

    @contextmanager
    def turn(
        self,
        conversation: Conversation,
        messages: Sequence[Message] = (),
        step: GraphStep | None = None,
        *,
        tools: Sequence[FrozenJson] = (),
        template_args: Mapping[str, Any] | None = None,
    ) -> Iterator[Turn]:
        """The thread for a call, once other calls are done with it.

        A conversation that is new gets a thread of its own, with the exact rows that another one
        of the same name, or without a name, has of its beginning.

        Args:
            conversation: of the call.
            messages, tools, template_args: of the call.
            step: of the graph around, if there is one.

        Raises:
            PatchKVError: this very thread of execution has the turn already, and would wait for
                itself.
        """
        slot = self._claim(conversation, messages, step)
        try:
            thread = self._engine.thread(slot.key[0], namespace=slot.key[1])
            if thread.history.head is None:
                self._share_prefix(slot, thread, messages, tools, template_args)
            yield Turn(thread, slot, messages, step)
        finally:
            slot.owner = None
            slot.lock.release()
            self._leave(slot)
            self._forget_oldest()

    @property
    def _engine(self) -> Engine:
        engine = self._engine_ref()
        if engine is None:
            raise RuntimeError("the engine is gone")
        return engine

    def _claim(
        self, conversation: Conversation, messages: Sequence[Message], step: GraphStep | None
    ) -> _Slot:
        """The slot for a call, locked."""
        while True:
            with self._lock:
                slots = [s for s in self._slots.values() if s.conversation == conversation]
                slot = chosen(slots, messages, step, is_named=conversation.is_named)
                is_new = slot is None
                if slot is None:
                    key = self._free_key(conversation)
                    slot = self._slots[key] = _Slot(key, conversation)
                self._slots.move_to_end(slot.key)
                slot.waiting += 1
                is_own = slot.owner == threading.get_ident()
                is_locked = slot.lock.acquire(blocking=False)
                if is_locked or not is_own:
                    slot.step, slot.pending = step, messages
            if not is_locked:
                if is_own:
                    self._leave(slot)
                    raise PatchKVError(
                        f"thread '{slot.key[0]}' is being streamed by the caller itself: finish "
                        "or close that stream first, or use another thread id"
                    )
                slot.lock.acquire()
            slot.owner = threading.get_ident()
            if not is_new or not self._has_other_history(slot, messages, step):
                return slot
            slot.owner = None
            slot.lock.release()
            self._leave(slot)

    def _has_other_history(
        self, slot: _Slot, messages: Sequence[Message], step: GraphStep | None
    ) -> bool:
        """Whether a new slot's thread has been another call's in an earlier process."""
        if step is None or not step.is_nested:
            return False
        head = self._engine.thread(slot.key[0], namespace=slot.key[1]).history.head
        if head is None:
            return False
        slot.context = head.messages
        return slot.relation(messages) == "other"

    def _free_key(self, conversation: Conversation) -> _Key:
        if not conversation.is_named:
            return f"conversation-{secrets.token_hex(6)}", conversation.namespace
        number, key = 0, (conversation.thread_id, conversation.namespace)
        while key in self._slots:
            number += 1
            key = f"{conversation.thread_id}-{number}", conversation.namespace
        return key

    def _share_prefix(
        self,
        slot: _Slot,
        thread: Thread,
        messages: Sequence[Message],
        tools: Sequence[FrozenJson],
        template_args: Mapping[str, Any] | None,
    ) -> None:
        """Give a new thread the exact rows of its beginning that another conversation has."""
        with self._lock:
            common: dict[_Key, int] = {}
            for other in self._slots.values():
                if other.conversation != slot.conversation or other is slot:
                    continue
                if other.owner == threading.get_ident():
                    continue  # it would wait for itself
                if not slot.conversation.is_named and other.waiting:
                    continue  # of somebody else, for whom nobody waits
                if size := common_beginning(other.context or other.pending, messages):
                    common[other.key] = size
            if not common:
                return
            # The oldest of those that have most, so that those beside wait for one, not in a ring.
            source = self._slots[max(sorted(common), key=common.__getitem__)]
            if source.waiting and source.key > slot.key:
                return
            source.waiting += 1
        with source.lock:
            source.owner = threading.get_ident()
            try:
                other_thread = self._engine.thread(source.key[0], namespace=source.key[1])
                thread.share_prefix(
                    other_thread, messages, tools=tools, template_args=template_args
                )
            except PatchKVError:  # somebody uses one of them without this table
                pass
            finally:
                source.owner = None
        self._leave(source)

    def _leave(self, slot: _Slot) -> None:
        with self._lock:
            slot.waiting -= 1

    def _forget_oldest(self) -> None:
        """Forget the conversations used longest ago, where there are too many."""
        with self._lock:
            for slot in list(self._slots.values())[: -self._limit]:
                if not slot.waiting:
                    del self._slots[slot.key]


_tables: WeakKeyDictionary[Engine, ChatThreads] = WeakKeyDictionary()
_tables_lock = threading.Lock()


def chat_threads(engine: Engine) -> ChatThreads:
    """The table of an engine, which all chat models over it share."""
    with _tables_lock:
        if engine not in _tables:
            _tables[engine] = ChatThreads(engine)
        return _tables[engine]
