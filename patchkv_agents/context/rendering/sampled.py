"""What the model sampled, and from which reply a message was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from patchkv_agents.context.messages import Message


@dataclass(frozen=True, slots=True)
class SampledReply:
    """What the model sampled for one answer.

    Attributes:
        token_ids: the sampled ids in order, without the one that ended the turn.
        text: their text, control tokens included.
    """

    token_ids: tuple[int, ...]
    text: str

    @classmethod
    def of(cls, token_ids: Sequence[int], tokenizer: Any) -> SampledReply:
        """The reply of these ids."""
        ids = [int(token_id) for token_id in token_ids]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cls(tuple(ids), str(text))


def match_replies(
    messages: Sequence[Message], replies: Sequence[SampledReply]
) -> dict[int, SampledReply]:
    """Find the replies from which assistant messages were made.

    A message is made from a reply of the same text, or else from one in which all that it says
    (reasoning, content, names of calls) occurs in this order: callers take replies apart and leave
    things out. A reply counts once; of equal ones, later messages get later ones.

    Args:
        messages: the messages of a context.
        replies: what was sampled, in the order of time.

    Returns:
        The reply of each message that has one, by index.
    """
    matched: dict[int, int] = {}
    unused = [number for number, reply in enumerate(replies) if reply.token_ids]
    for is_origin in (_is_whole, _is_said_in):
        following = len(replies)  # the reply of the message behind
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].role != "assistant":
                continue
            if index not in matched:
                # Earlier ones first, the latest of them; but messages may have been moved.
                order = sorted(unused, key=lambda n: (n < following, n), reverse=True)
                found = (n for n in order if is_origin(messages[index], replies[n]))
                number = next(found, None)
                if number is None:
                    continue
                matched[index] = number
                unused.remove(number)
            following = matched[index]
    return {index: replies[number] for index, number in matched.items()}


def _is_whole(message: Message, reply: SampledReply) -> bool:
    plain = not message.tool_calls and message.reasoning is None
    return plain and message.text.strip() == reply.text.strip()


def _is_said_in(message: Message, reply: SampledReply) -> bool:
    said = (message.reasoning or "", message.text, *(call.name for call in message.tool_calls))
    place = 0
    for text in filter(None, map(str.strip, said)):
        found = reply.text.find(text, place)
        if found < 0:
            return False
        place = found + len(text)
    return place > 0  # something is said
