"""Which conversation a call belongs to, by its configuration and by its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from patchkv_agents.context.frozen import FrozenJson, to_json
from patchkv_langchain.graph_steps import agent_path

if TYPE_CHECKING:
    from patchkv_agents.context import Message
    from patchkv_langchain.graph_steps import GraphStep

_MIN_SHARE = 0.5  # of a context's text, for it to be of a conversation without any id in common
_MIN_ANSWER = 16  # characters; a shorter answer can be given in two conversations

Relation = Literal["continued", "edited", "other"]
"""What a context is to a conversation: gone on, edited, or another conversation."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The name of a conversation, as far as the configuration of a call has one.

    Attributes:
        thread_id: given by the user; empty if there is none.
        namespace: the part of the thread: an agent of a graph, a summarizer, a set of tools.
    """

    thread_id: str
    namespace: str

    @property
    def is_named(self) -> bool:
        """Whether the user has named the thread. Otherwise the messages alone tell."""
        return bool(self.thread_id)

    @classmethod
    def of(
        cls,
        *,
        thread: str | None,
        config: Mapping[str, Any],
        tools: Sequence[FrozenJson],
        template_args: Mapping[str, Any],
    ) -> Conversation:
        """The conversation of a call.

        Args:
            thread: name given with the model or the call; before what the config says.
            config: LangChain's configuration of the run.
            tools, template_args: of the call. Others make another context from the first token on.
        """
        configurable = config.get("configurable") or {}
        metadata = config.get("metadata") or {}
        path = agent_path(str(configurable.get("checkpoint_ns") or ""))
        shown = to_json([[tool.text for tool in tools], dict(template_args)])
        parts = [path, metadata.get("lc_agent_name"), metadata.get("lc_source"), _digest(shown)]
        name = thread or configurable.get("thread_id")
        return cls("" if name is None else str(name), "/".join(str(part) for part in parts if part))


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def common_beginning(old: Sequence[Message], new: Sequence[Message]) -> int:
    """How many messages two lists have in common at their beginning, by what they say."""
    size = min(len(old), len(new))
    return next((i for i in range(size) if old[i].content_hash != new[i].content_hash), size)


def relation(
    old: Sequence[Message], new: Sequence[Message], answers: Sequence[Message] = ()
) -> Relation:
    """What a context is to a conversation that nobody named.

    Two users may begin alike, and even get the same answers. So a context is an edited one of this
    conversation only if it has something behind the first difference that no other conversation
    has: the same message under the same id, a call of the same id, or an answer given here.

    Args:
        old: the conversation's last context.
        new: the context.
        answers: that were given in the conversation.
    """
    common = common_beginning(old, new)
    beginning = zip(old[:common], new[:common], strict=True)
    if any(not _may_be_same(before, after) for before, after in beginning):
        return "other"
    if common == len(old):
        return "continued"
    rest = _signs(new[common:])
    # What begins in the common part, such as a call whose result differs, tells nothing.
    marks = (_signs(old[common:]) | _signs(answers)) - _signs(new[:common])
    if marks & rest:
        return "edited"
    texts = {message.content_hash for message in answers if len(message.text) >= _MIN_ANSWER}
    return "edited" if texts & {message.content_hash for message in new[common:]} else "other"


def named_relation(old: Sequence[Message], new: Sequence[Message]) -> Relation:
    """What a context is to an earlier one of the same agent in the same thread.

    A subagent that is called again begins anew, unless it is shown something of the earlier call.
    """
    common = common_beginning(old, new)
    if common == len(old):
        return "continued"
    if _ids(old) & _ids(new):
        return "edited"
    said = {message.content_hash for message in old if not _is_system(message)}
    sizes = [(m.content_hash in said, len(m.text)) for m in new if not _is_system(m)]
    shared = sum(size for is_shared, size in sizes if is_shared)
    is_large = shared > 0 and shared >= _MIN_SHARE * sum(size for _, size in sizes)
    return "edited" if is_large else "other"


class Candidate(Protocol):
    """A conversation that a call may go on with."""

    @property
    def step(self) -> GraphStep | None:
        """Where in a graph its last call was."""

    @property
    def context(self) -> Sequence[Message]:
        """The messages of its last call that was answered; empty if none was yet."""

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""

    def relation(self, messages: Sequence[Message]) -> Relation:
        """What a context is to it."""


C = TypeVar("C", bound=Candidate)


def chosen(
    candidates: Sequence[C],
    messages: Sequence[Message],
    step: GraphStep | None,
    *,
    is_named: bool,
) -> C | None:
    """The conversation that a call goes on with; None if it begins a new one.

    Calls of one task of a graph, or of one run of a graph inside of another, go on with each other;
    tasks of one step never do. What else belongs together, the messages tell.

    Args:
        candidates: conversations of one name, or without one; the last used comes last.
        messages: of the call.
        step: of the call, inside of a graph.
        is_named: whether the user has named the thread: then a call waits for its turn.
    """
    if step is not None:
        same = [each for each in candidates if each.step and each.step.is_same_run(step)]
        if same:
            return same[-1]
        candidates = [each for each in candidates if not (each.step and each.step.is_beside(step))]
    if is_named:
        if step is None or (not step.is_nested and len(candidates) == 1):
            return candidates[-1] if candidates else None
    else:  # one that is busy may be another's; there is no need to wait
        candidates = [each for each in candidates if not each.is_busy]
    ranked = [(_rank(each, messages), number) for number, each in enumerate(candidates)]
    rank, number = max(ranked, default=((-1, 0), 0))
    return candidates[number] if rank > (-1, 0) else None


def _rank(candidate: Candidate, messages: Sequence[Message]) -> tuple[int, int]:
    """How well a context goes on with a conversation: at all, and with how much in common."""
    if not candidate.context:
        return (-1 if candidate.is_busy else 0), 0
    related = candidate.relation(messages)
    if related == "other":
        return -1, 0
    order = 2 if related == "continued" else 1
    return order, common_beginning(candidate.context, messages)


def _may_be_same(old: Message, new: Message) -> bool:
    """Whether two messages of the same content may be one: answers and calls have ids."""
    if old.role != "assistant":
        return True
    if old.id is not None and new.id is not None and old.id != new.id:
        return False
    return [call.id for call in old.tool_calls] == [call.id for call in new.tool_calls]


def _signs(messages: Sequence[Message]) -> set[tuple[str, str]]:
    """Ids that mean something together with what the message says, and ids of calls."""
    signs = {(message.id, message.content_hash) for message in messages if message.id}
    return signs | {("", name) for name in _call_ids(messages)}


def _ids(messages: Sequence[Message]) -> set[str]:
    shown = [message for message in messages if not _is_system(message)]
    return {message.id for message in shown if message.id} | _call_ids(shown)


def _call_ids(messages: Sequence[Message]) -> set[str]:
    results = {message.tool_call_id for message in messages if message.tool_call_id}
    return results | {call.id for message in messages for call in message.tool_calls if call.id}


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")
