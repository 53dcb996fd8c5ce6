"""Which of the engine's threads a call of the model belongs to, and whose turn it is."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from patchkv_agents.context.frozen import FrozenJson, to_json
from patchkv_agents.errors import PatchKVError

if TYPE_CHECKING:
    from patchkv_agents.context import Message
    from patchkv_agents.engine import Engine, Thread

MAX_THREADS = 64
"""Conversations whose state an engine keeps for chat models; the one used longest ago goes."""

_TASK = re.compile(r":[^|:]*$")  # LangGraph's id of the task, at the end of a namespace


@dataclass(frozen=True, slots=True)
class Conversation:
    """What shares one KV state.

    Attributes:
        thread_id: of the conversation.
        namespace: the part of it: a subagent, a summariser, another set of tools.
        is_named: whether somebody named the thread. Otherwise the id says how the conversation
            begins, and calls at the same time may be of several conversations that begin alike.
    """

    thread_id: str
    namespace: str
    is_named: bool

    @classmethod
    def of(
        cls,
        messages: Sequence[Message],
        *,
        thread: str | None,
        config: Mapping[str, Any],
        tools: Sequence[FrozenJson],
        template_args: Mapping[str, Any],
    ) -> Conversation:
        """The conversation of a call.

        Args:
            messages: of the call.
            thread: name given with the model or the call; before what the config says.
            config: LangChain's configuration of the run.
            tools, template_args: of the call. Others make another context from the first token on.
        """
        configurable = config.get("configurable") or {}
        metadata = config.get("metadata") or {}
        # The ids of the graphs around are kept: each run of a subagent is a conversation. The
        # node's own is not: it differs at each step.
        node = _TASK.sub("", str(configurable.get("checkpoint_ns") or ""))
        shown = to_json([[tool.text for tool in tools], dict(template_args)])
        parts = [node, metadata.get("lc_agent_name"), metadata.get("lc_source"), _digest(shown)]
        namespace = "/".join(str(part) for part in parts if part)
        thread = thread or configurable.get("thread_id")
        if thread is not None:
            return cls(str(thread), namespace, is_named=True)
        opening = []
        for message in messages:
            opening.append(message.content_hash)
            if message.role == "user":
                break
        return cls(f"conversation-{_digest(to_json(opening))}", namespace, is_named=False)


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class _Turn:
    """Whose turn it is on one thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None  # the thread of execution that has the turn
        self.waiting = 0


class ChatThreads:
    """The threads of one engine that chat models use. One call at a time has the turn on each."""

    def __init__(self, engine: Engine, most: int = MAX_THREADS) -> None:
        self._engine_ref = ref(engine)  # the tables of engines must not keep these alive
        self._most = most
        self._turns: OrderedDict[tuple[str, str], _Turn] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, conversation: Conversation) -> Iterator[Thread]:
        """The thread of a conversation, once other calls are done with it.

        Raises:
            PatchKVError: this very thread of execution has the turn already, and would wait for
                itself.
        """
        for number in count():
            name = conversation.thread_id + (f"-{number}" if number else "")
            key = name, conversation.namespace
            turn = self._join(key)
            if turn.lock.acquire(blocking=False):
                break
            if not conversation.is_named:  # that one may be another's; there is no need to wait
                self._leave(turn)
                continue
            if turn.owner == threading.get_ident():
                self._leave(turn)
                raise PatchKVError(
                    f"thread '{name}' is being streamed by the caller itself: finish or close "
                    "that stream first, or use another thread id"
                )
            turn.lock.acquire()
            break
        try:
            turn.owner = threading.get_ident()
            yield self._engine.thread(key[0], namespace=key[1])
        finally:
            turn.owner = None
            turn.lock.release()
            self._leave(turn)
            self._drop_oldest()

    @property
    def _engine(self) -> Engine:
        engine = self._engine_ref()
        if engine is None:
            raise RuntimeError("the engine is gone")
        return engine

    def _join(self, key: tuple[str, str]) -> _Turn:
        with self._lock:
            turn = self._turns.setdefault(key, _Turn())
            self._turns.move_to_end(key)
            turn.waiting += 1
            return turn

    def _leave(self, turn: _Turn) -> None:
        with self._lock:
            turn.waiting -= 1

    def _drop_oldest(self) -> None:
        while (found := self._take_oldest()) is not None:
            key, turn = found
            try:
                # Into the engine's store, if it has one.
                self._engine.thread(key[0], namespace=key[1]).suspend()
                self._engine.drop(key[0], namespace=key[1])
            except PatchKVError:  # somebody uses the thread without this table: it stays
                pass
            finally:
                turn.lock.release()
                with self._lock:
                    turn.waiting -= 1
                    if not turn.waiting:
                        del self._turns[key]

    def _take_oldest(self) -> tuple[tuple[str, str], _Turn] | None:
        """If there are too many, the one used longest ago that nobody waits for, with its turn."""
        with self._lock:
            if len(self._turns) <= self._most:
                return None
            for key, turn in self._turns.items():
                if not turn.waiting:
                    turn.waiting += 1
                    turn.lock.acquire()
                    return key, turn
            return None


_tables: WeakKeyDictionary[Engine, ChatThreads] = WeakKeyDictionary()
_tables_lock = threading.Lock()


def chat_threads(engine: Engine) -> ChatThreads:
    """The table of an engine, which all chat models over it share."""
    with _tables_lock:
        if engine not in _tables:
            _tables[engine] = ChatThreads(engine)
        return _tables[engine]
