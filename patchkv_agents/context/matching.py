"""Finds which message of a new version is which message of the old one.

Messages are matched by content hash first. What lies between two matches is a block of old
messages replaced by new ones: inside it, tool_call_ids say which message became which; without
them, the order, the roles and the words do. Message ids are not used: templates do not show
them, and programs that number their messages give the same id to another message.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from patchkv_agents.context.comparison import similarity
from patchkv_agents.context.messages import Message

# A block in which more pairs than this would have to be compared is taken as rewritten entirely.
_MAX_COMPARISONS = 2_500
# Two messages with a smaller share of text in common are two, not one that was edited.
_SAME_MESSAGE = 0.5
# A summary is a message, or one with an acknowledgement.
_LONGEST_SUMMARY = 2


@dataclass(slots=True)
class Matching:
    """What became of the messages; indices into the old and the new list.

    Attributes:
        kept: pairs of messages with the same content.
        edited: pairs of messages that are one, changed.
        moved: pairs of messages with the same content, out of order.
        summarized: several old messages, and the fewer new ones in their place.
        removed: old messages that are gone.
        added: new messages.
    """

    kept: list[tuple[int, int]] = field(default_factory=list)
    edited: list[tuple[int, int]] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)
    summarized: list[tuple[range, range]] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)


def match_messages(old: Sequence[Message], new: Sequence[Message]) -> Matching:
    """Match two lists of messages. Every index is in exactly one entry of the result."""
    matching = Matching()
    hashes = [m.content_hash for m in old], [m.content_hash for m in new]
    for olds, news, equal in _blocks(*hashes):
        if equal:
            matching.kept += zip(olds, news, strict=True)
        else:
            _match_by_calls(old, new, olds, news, matching)
    _find_moves(*hashes, matching)
    return matching


def _blocks(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[tuple[range, range, bool]]:
    """Cut two sequences into blocks that are equal and blocks that are not."""
    # Ends that are equal need no matching, which takes quadratic time on repeated messages.
    shorter = min(len(old), len(new))
    head = next((k for k in range(shorter) if old[k] != new[k]), shorter)
    rest = shorter - head
    tail = next((k for k in range(rest) if old[-1 - k] != new[-1 - k]), rest)
    old_stop, new_stop = len(old) - tail, len(new) - tail
    blocks = [(range(head), range(head), True)]
    matcher = SequenceMatcher(None, old[head:old_stop], new[head:new_stop], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        blocks.append((range(head + i1, head + i2), range(head + j1, head + j2), tag == "equal"))
    blocks.append((range(old_stop, len(old)), range(new_stop, len(new)), True))
    return blocks


def _match_by_calls(
    old: Sequence[Message], new: Sequence[Message], olds: range, news: range, matching: Matching
) -> None:
    old_keys = [_call_key(old[i]) or ("old", i) for i in olds]
    new_keys = [_call_key(new[j]) or ("new", j) for j in news]
    for rows, columns, equal in _blocks(old_keys, new_keys):
        some_olds, some_news = olds[rows.start : rows.stop], news[columns.start : columns.stop]
        if equal:
            matching.edited += zip(some_olds, some_news, strict=True)
        else:
            _match_by_words(old, new, some_olds, some_news, matching)


def _call_key(message: Message) -> Hashable:
    """What ties a message to calls, if anything does."""
    if message.role in ("tool", "function"):
        return message.tool_call_id and (message.role, message.tool_call_id)
    ids = tuple(call.id for call in message.tool_calls if call.id)
    return ids and (message.role, ids)


def _match_by_words(
    old: Sequence[Message], new: Sequence[Message], olds: range, news: range, matching: Matching
) -> None:
    old_start, new_start = olds.start, news.start
    for i, j in [*_similar_pairs(old, new, olds, news), (olds.stop, news.stop)]:
        _match_rest(old, new, range(old_start, i), range(new_start, j), matching)
        if i < olds.stop:
            matching.edited.append((i, j))
        old_start, new_start = i + 1, j + 1


def _similar_pairs(
    old: Sequence[Message], new: Sequence[Message], olds: range, news: range
) -> list[tuple[int, int]]:
    """Pairs of similar messages in order, with the greatest similarity in all."""
    if not 0 < len(olds) * len(news) <= _MAX_COMPARISONS:
        return []
    # best[a][b]: greatest sum of similarities of the first a old and b new messages.
    best = [[0.0] * (len(news) + 1) for _ in range(len(olds) + 1)]
    gains: dict[tuple[int, int], float] = {}
    for a, i in enumerate(olds, 1):
        for b, j in enumerate(news, 1):
            gain = similarity(old[i], new[j])
            if gain >= _SAME_MESSAGE:
                gains[a, b] = gain
            with_pair = best[a - 1][b - 1] + gains.get((a, b), 0.0)
            best[a][b] = max(best[a - 1][b], best[a][b - 1], with_pair)
    pairs = []
    a, b = len(olds), len(news)
    while a and b:
        if best[a][b] == best[a - 1][b]:
            a -= 1
        elif best[a][b] == best[a][b - 1]:
            b -= 1
        else:
            a, b = a - 1, b - 1
            pairs.append((olds[a], news[b]))
    return pairs[::-1]


def _match_rest(
    old: Sequence[Message], new: Sequence[Message], olds: range, news: range, matching: Matching
) -> None:
    """Messages that resemble none of the other side."""
    if len(olds) == len(news) == 1 and old[olds[0]].role == new[news[0]].role:
        matching.edited.append((olds[0], news[0]))
    elif 0 < len(news) < len(olds) and _can_be_summary([new[j] for j in news]):
        matching.summarized.append((olds, news))
    else:
        matching.removed += olds
        matching.added += news


def _can_be_summary(messages: Sequence[Message]) -> bool:
    plain = (m.role not in ("tool", "function") and not m.tool_calls for m in messages)
    return len(messages) <= _LONGEST_SUMMARY and all(plain)


def _find_moves(old_hashes: Sequence[str], new_hashes: Sequence[str], matching: Matching) -> None:
    """Turn removed and added messages of the same content into moves."""
    places: dict[str, list[int]] = {}
    for j in reversed(matching.added):
        places.setdefault(new_hashes[j], []).append(j)
    for i in list(matching.removed):
        if found := places.get(old_hashes[i]):
            matching.moved.append((i, found.pop()))
            matching.removed.remove(i)
            matching.added.remove(matching.moved[-1][1])
