"""Notes: who changed which messages, taken where it happens and read where the model is called.

A note names messages by what they say, not by place: between the change and the call, other
middleware may shift them, and the version that the model saw last may be older than the program's
own state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

    from patchkv_agents.context import ContextHistory, EditKind, Message
    from patchkv_agents.context.edits import EditPlace

MAX_NOTES = 256
"""Notes kept for a thread, or for one context of execution; older ones are dropped."""

Sign = tuple[str, str]
"""A message's content hash and the tool call that it answers, if any."""


def sign(message: Message) -> Sign:
    """What tells a message with its content: ids may be given later, so they do not count."""
    return message.content_hash, message.tool_call_id or ""


def names(message: Message) -> frozenset[str]:
    """What tells a message whatever became of its content."""
    calls = (call.id for call in message.tool_calls)
    given = filter(None, (message.id, message.tool_call_id, *calls))
    return frozenset((message.content_hash, *given))


@dataclass(frozen=True, slots=True)
class Note:
    """One change.

    Attributes:
        removed: names of the messages that were changed or removed.
        added: what stands in their place; empty if nothing does.
        author: who made the change, if known.
        kind: what it was meant to be, if known.
        reason: in the author's words, if known.
        where: whether the program's state was changed, or the request alone.
        partial: only a part of the message changed.
    """

    removed: frozenset[str]
    added: frozenset[Sign]
    author: str | None = None
    kind: EditKind | None = None
    reason: str = ""
    where: EditPlace = "state"
    partial: bool = False


class ServingThread(Protocol):
    """What answers a conversation and keeps its versions: an engine's `Thread`."""

    @property
    def history(self) -> ContextHistory:
        """The versions of its context."""
        ...

    def suspend(self) -> None:
        """Store the state in CPU memory and free the cache."""


class ModelCall:
    """One call of a model, as the middleware around it sees it.

    Attributes:
        thread: that answered, where the model has said so by `served_by`.
        shown: the messages that the model was shown, where LangChain has said so.
    """

    thread: ServingThread | None = None
    shown: Sequence[BaseMessage] | None = None


Serve = Callable[[ServingThread], None]
"""Is called with the thread that answers a call that no middleware is around."""

_notes: ContextVar[tuple[Note, ...]] = ContextVar("patchkv_notes", default=())
_call: ContextVar[ModelCall | None] = ContextVar("patchkv_model_call", default=None)
_serve: ContextVar[Serve | None] = ContextVar("patchkv_serve", default=None)


def noted() -> tuple[Note, ...]:
    """The notes that hold here, the newest last."""
    return _notes.get()


def note(notes: Iterable[Note]) -> None:
    """Add notes, for model calls made from here on in this context of execution."""
    _notes.set((*_notes.get(), *notes)[-MAX_NOTES:])


@contextmanager
def model_call(notes: Iterable[Note]) -> Iterator[ModelCall]:
    """Add notes for the model call within."""
    call = ModelCall()
    before = _notes.get()
    note(notes)
    token = _call.set(call)
    try:
        yield call
    finally:
        _call.reset(token)
        _notes.set(before)


@contextmanager
def serving(serve: Serve) -> Iterator[None]:
    """Be notified of the threads that answer calls within, of agents that a tool runs."""
    call_token, serve_token = _call.set(None), _serve.set(serve)
    try:
        yield
    finally:
        _serve.reset(serve_token)
        _call.reset(call_token)


def current_call() -> ModelCall | None:
    """The call of a model that is under way, if a middleware is around it."""
    return _call.get()


def served_by(thread: ServingThread) -> None:
    """Notify the middleware around the present call of a model, if any, which thread answers it."""
    call, serve = _call.get(), _serve.get()
    if call is not None:
        call.thread = thread
    elif serve is not None:
        serve(thread)
