"""Which earlier version a context goes on from, where nothing but its messages tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from patchkv_agents.context.messages import Message

Hashes = tuple[int, ...]
"""Of the messages of a version, one each."""


def message_hashes(messages: Sequence[Message]) -> Hashes:
    """What messages are compared by here: what they say, not their ids. Means nothing elsewhere."""
    return tuple([hash(message.content_hash) for message in messages])


def continued(
    messages: Sequence[Message],
    head: Sequence[Message],
    others: Mapping[str, Hashes],
    led_to_head: Callable[[str], bool],
) -> str | None:
    """The version that a context goes on from, if that is not the one worked on last.

    Any two contexts may be an edit apart, so an edit of the last version is what is taken for
    granted. A context goes on from another version if it begins with all messages of that, an
    answer next, as one does that is gone back to; and if it gives up what the last version has
    beyond that: no message of it is there at a later place, nor another form of one under the same
    id, and more are given up than the other version lacks of the common beginning. What came of the
    last version by undoing an edit is an edit, though.

    Args:
        messages: of the context.
        head: messages of the version worked on last.
        others: further versions, oldest first.
        led_to_head: whether the last version came from one of these, by its id.

    Returns:
        The version's id; None if it is the one worked on last.
    """
    new, last = message_hashes(messages), message_hashes(head)
    shorter = min(len(new), len(last))
    common = next((i for i in range(shorter) if new[i] != last[i]), shorter)
    found, size = None, common if common == len(last) else 0
    for version, old in others.items():
        if len(old) >= size and old != last and new[: len(old)] == old:
            found, size = version, len(old)
    if found is None or (size < len(new) and messages[size].role != "assistant"):
        return None
    if size > common:
        return None if led_to_head(found) else found
    given_up = len(last) - common
    if common - size >= given_up or _is_among(messages[common:], head[common:]):
        return None
    return found


def _is_among(later: Sequence[Message], given_up: Sequence[Message]) -> bool:
    """Whether any of the messages is one of those given up, or takes the place of one."""
    known = {sign for message in given_up for sign in _signs(message)}
    return any(not known.isdisjoint(_signs(message)) for message in later)


def _signs(message: Message) -> set[str | None]:
    return {message.content_hash, message.id, message.tool_call_id} - {None}
