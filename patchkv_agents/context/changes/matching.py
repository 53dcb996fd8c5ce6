"""Finds which message of a new version is which message of the old one.

Messages are matched by content hash first, in order, then out of order (moves). What lies between
two matches is a block of old messages replaced by new ones: inside it, tool_call_ids say which
message became which; without them, the order, the roles and the words do. Calls and results of
different ids are never one message that was edited, however alike they are. Message ids only say
which of several equal messages is meant: templates do not show them, and programs that number
their messages give the same id to another message.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from patchkv_agents.alignment import align
from patchkv_agents.context.changes.comparison import full_text, plain_role
from patchkv_agents.context.messages import Message
from patchkv_agents.context.sequences import equal_ends
from patchkv_agents.context.texts import TextProfile

# A block with more pairs, or more text in all pairs, is not compared each with each.
_MAX_COMPARISONS = 2_500
_MAX_COMPARED_TEXT = 20_000_000
# Two messages with a smaller share of text in common are two, not one that was edited.
_SAME_MESSAGE = 0.5
# A summary is a message, or one with an acknowledgement.
_LONGEST_SUMMARY = 2
# A shorter message can be said again by chance: only its id tells that it moved.
_SHORTEST_MOVE = 16

_Pair = tuple[int, int]


@dataclass(slots=True)
class Matching:
    """What became of the messages; indices into the old and the new list.

    Attributes:
        kept: pairs of messages with the same content, in order.
        edited: pairs of messages that are one, changed.
        moved: pairs of messages with the same content, out of order.
        summarized: several old messages, and the new one that stands for them.
        removed: old messages that are gone.
        added: new messages.
    """

    kept: list[_Pair] = field(default_factory=list)
    edited: list[_Pair] = field(default_factory=list)
    moved: list[_Pair] = field(default_factory=list)
    summarized: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)

    def shifted(self, by: int) -> Matching:
        """The matching of lists that begin with so many more messages."""
        return Matching(
            kept=[(i + by, j + by) for i, j in self.kept],
            edited=[(i + by, j + by) for i, j in self.edited],
            moved=[(i + by, j + by) for i, j in self.moved],
            summarized=[(tuple(i + by for i in olds), j + by) for olds, j in self.summarized],
            removed=[i + by for i in self.removed],
            added=[j + by for j in self.added],
        )


def match_messages(old: Sequence[Message], new: Sequence[Message]) -> Matching:
    """Match two lists of messages. Every index is in exactly one entry of the result."""
    head, tail = equal_ends(old, new, _is_copy)
    old_stop, new_stop = len(old) - tail, len(new) - tail
    matching = _matched(old[head:old_stop], new[head:new_stop]).shifted(head)
    matching.kept = [
        *zip(range(head), range(head), strict=True),
        *matching.kept,
        *zip(range(old_stop, len(old)), range(new_stop, len(new)), strict=True),
    ]
    return matching


def _is_copy(old: Message, new: Message) -> bool:
    return old.content_hash == new.content_hash and old.id == new.id


def _matched(old: Sequence[Message], new: Sequence[Message]) -> Matching:
    matching = Matching(kept=_kept(old, new))
    matching.moved = _moved(old, new, matching.kept)
    from_old, from_new = {i for i, _ in matching.moved}, {j for _, j in matching.moved}
    for olds, news in _between(matching.kept, len(old), len(new)):
        stays = [i for i in olds if i not in from_old]
        _Block(old, new, matching).match(stays, [j for j in news if j not in from_new])
    for entry in (matching.edited, matching.removed, matching.added):
        entry.sort()
    return matching


def _kept(old: Sequence[Message], new: Sequence[Message]) -> list[_Pair]:
    """Pairs of equal messages in order, as many as there can be."""
    olds, news = [m.content_hash for m in old], [m.content_hash for m in new]
    pairs = _in_order([(m.content_hash, m.id) for m in old], [(m.content_hash, m.id) for m in new])
    if len(pairs) < min(len(old), len(new)):
        for i, j in _between(pairs, len(old), len(new)):
            inner = _in_order(olds[i.start : i.stop], news[j.start : j.stop])
            pairs = [*pairs, *((i.start + a, j.start + b) for a, b in inner)]
        plain = _in_order(olds, news)
        pairs = sorted(pairs) if len(pairs) >= len(plain) else plain
    return pairs


def _in_order(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[_Pair]:
    """Pairs of equal keys, increasing on both sides, as many as there can be.

    Equal ends come first: one of several copies that changed is a change, not a copy that came
    and one that went.
    """
    head, tail = equal_ends(old, new)
    ends = [(k, k) for k in range(head)]
    ends += [(len(old) - k, len(new) - k) for k in range(tail, 0, -1)]
    middles = old[head : len(old) - tail], new[head : len(new) - tail]
    if set(middles[0]).isdisjoint(middles[1]):
        return ends
    numbers: dict[Hashable, int] = {}
    ids = [[numbers.setdefault(key, len(numbers)) for key in keys] for keys in middles]
    inner = [
        (head + run.old_start + k, head + run.new_start + k)
        for run in align(*ids, min_run=1).runs
        for k in range(run.length)
    ]
    return sorted(ends + inner)


def _between(pairs: Sequence[_Pair], old_stop: int, new_stop: int) -> Iterator[tuple[range, range]]:
    """What lies before, between and behind `pairs`, where there is something."""
    i = j = 0
    for next_i, next_j in [*sorted(pairs), (old_stop, new_stop)]:
        if i < next_i or j < next_j:
            yield range(i, next_i), range(j, next_j)
        i, j = next_i + 1, next_j + 1


def _moved(old: Sequence[Message], new: Sequence[Message], kept: Sequence[_Pair]) -> list[_Pair]:
    """Pairs of equal messages among those that are not kept."""
    stay_old, stay_new = {i for i, _ in kept}, {j for _, j in kept}
    places: dict[str, list[int]] = {}
    for j in reversed(range(len(new))):
        if j not in stay_new:
            places.setdefault(new[j].content_hash, []).append(j)
    pairs = []
    for i, message in enumerate(old):
        found = places.get(message.content_hash, []) if i not in stay_old else []
        if found and _is_same(message, new[found[-1]]):
            pairs.append((i, found.pop()))
    return pairs


def _is_same(old: Message, new: Message) -> bool:
    """Whether two messages of the same content are one, which moved."""
    key = _call_key(old)
    if key or _call_key(new):
        return key == _call_key(new)
    if len(full_text(old).strip()) >= _SHORTEST_MOVE:
        return True
    return old.id is not None and old.id == new.id


def _call_key(message: Message) -> Hashable:
    """What ties a message to calls, if anything does."""
    if message.role in ("tool", "function"):
        return message.tool_call_id and (message.role, message.tool_call_id)
    ids = tuple(call.id for call in message.tool_calls if call.id)
    return ids and (message.role, ids)


def _call_ids(message: Message) -> set[str]:
    own = {message.tool_call_id} if message.role in ("tool", "function") else set()
    return {name for name in own | {call.id for call in message.tool_calls} if name}


def _are_other_calls(old: Message, new: Message) -> bool:
    """Whether ids say that two messages are calls, or results, of different calls."""
    ids, others = _call_ids(old), _call_ids(new)
    return bool(ids and others) and ids.isdisjoint(others)


class _Block:
    """Old messages between two kept ones, and the new ones in their place."""

    def __init__(self, old: Sequence[Message], new: Sequence[Message], matching: Matching) -> None:
        self._old, self._new, self._matching = old, new, matching
        self._profiles: dict[tuple[str, int], TextProfile] = {}

    def match(self, olds: Sequence[int], news: Sequence[int]) -> None:
        """Enter into the matching what became of `olds`, and where `news` come from."""
        by_call = _in_order(
            [_call_key(self._old[i]) or ("old", i) for i in olds],
            [_call_key(self._new[j]) or ("new", j) for j in news],
        )
        self._matching.edited += [(olds[a], news[b]) for a, b in by_call]
        for rows, columns in _between(by_call, len(olds), len(news)):
            self._match_by_words(olds[rows.start : rows.stop], news[columns.start : columns.stop])

    def _match_by_words(self, olds: Sequence[int], news: Sequence[int]) -> None:
        pairs = self._similar_pairs(olds, news)
        self._matching.edited += [(olds[a], news[b]) for a, b in pairs]
        for rows, columns in _between(pairs, len(olds), len(news)):
            self._match_rest(olds[rows.start : rows.stop], news[columns.start : columns.stop])

    def _similar_pairs(self, olds: Sequence[int], news: Sequence[int]) -> list[_Pair]:
        """Places of similar messages, in order, with the greatest similarity in all."""
        if not olds or not news or len(olds) == len(news) == 1:
            return []
        text = sum(len(self._old[i].text) for i in olds) * len(news)
        text += sum(len(self._new[j].text) for j in news) * len(olds)
        if len(olds) * len(news) > _MAX_COMPARISONS or text > _MAX_COMPARED_TEXT:
            return self._similar_ends(olds, news)
        # best[a][b]: greatest sum of similarities of the first a old and b new messages.
        best = [[0.0] * (len(news) + 1) for _ in range(len(olds) + 1)]
        for a, i in enumerate(olds, 1):
            for b, j in enumerate(news, 1):
                with_pair = best[a - 1][b - 1] + self._gain(i, j)
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
                pairs.append((a, b))
        return pairs[::-1]

    def _similar_ends(self, olds: Sequence[int], news: Sequence[int]) -> list[_Pair]:
        """Similar messages at the same place, counted from the front, and from the back."""
        size = min(len(olds), len(news))
        if len(olds) == len(news):
            return [(k, k) for k in range(size) if self._gain(olds[k], news[k])]
        head = next((k for k in range(size) if not self._gain(olds[k], news[k])), size)
        rest = size - head
        tail = next((k for k in range(rest) if not self._gain(olds[-1 - k], news[-1 - k])), rest)
        front = [(k, k) for k in range(head)]
        return front + [(len(olds) - k, len(news) - k) for k in range(tail, 0, -1)]

    def _gain(self, i: int, j: int) -> float:
        """Similarity of an old and a new message; 0 if they are two."""
        if self._roles("old", [i]) != self._roles("new", [j]) or self._are_other_calls(i, j):
            return 0.0
        value = self._profile("old", i).similarity(self._profile("new", j))
        return value if value >= _SAME_MESSAGE else 0.0

    def _profile(self, side: str, index: int) -> TextProfile:
        profile = self._profiles.get((side, index))
        if profile is None:
            messages = self._old if side == "old" else self._new
            profile = self._profiles[side, index] = TextProfile(full_text(messages[index]))
        return profile

    def _roles(self, side: str, indices: Sequence[int]) -> list[str]:
        messages = self._old if side == "old" else self._new
        return [plain_role(messages[index]) for index in indices]

    def _are_other_calls(self, i: int, j: int) -> bool:
        return _are_other_calls(self._old[i], self._new[j])

    def _match_rest(self, olds: Sequence[int], news: Sequence[int]) -> None:
        """Messages that resemble none of the other side."""
        matching = self._matching
        if self._roles("old", olds) == self._roles("new", news):
            for i, j in zip(olds, news, strict=True):
                if self._are_other_calls(i, j):
                    matching.removed.append(i)
                    matching.added.append(j)
                else:
                    matching.edited.append((i, j))
            return
        # Calls made since, and their results, stand behind a summary and are no part of it.
        known = set().union(*(_call_ids(self._old[i]) for i in olds))
        since = [j for j in news if _call_ids(self._new[j]) and known]
        since = [j for j in since if _call_ids(self._new[j]).isdisjoint(known)]
        plain = [j for j in news if j not in since]
        if 0 < len(plain) < len(olds) and _can_be_summary([self._new[j] for j in plain]):
            # The other one, if any, acknowledges it.
            summary = max(plain, key=lambda j: len(self._new[j].text))
            matching.summarized.append((tuple(olds), summary))
            matching.added += [j for j in news if j != summary]
        else:
            matching.removed += olds
            matching.added += news


def _can_be_summary(messages: Sequence[Message]) -> bool:
    plain = (m.role not in ("tool", "function") and not m.tool_calls for m in messages)
    return len(messages) <= _LONGEST_SUMMARY and all(plain)
