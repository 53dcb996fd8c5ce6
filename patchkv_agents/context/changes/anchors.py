"""Token spans of messages that are the same in two renderings: anchors for the alignment."""

from __future__ import annotations

from collections.abc import Sequence

from patchkv_agents.context.changes.matching import Matching

_Span = tuple[int, int]


def message_anchors(
    old: Sequence[_Span], new: Sequence[_Span], matching: Matching
) -> tuple[tuple[_Span, _Span], ...]:
    """Pairs of token spans, old and new, for `patchkv_agents.alignment.align`.

    Nothing more is claimed than that the messages are the same: a template may write one in two
    ways, and spans may be guesses where a rendering is not verified. The alignment compares.

    Args:
        old: `RenderedContext.message_spans` of the old messages.
        new: the same of the new messages.
        matching: `match_messages` of the same two lists.
    """
    pairs = sorted([*matching.kept, *matching.moved])
    return tuple((old[i], new[j]) for i, j in pairs)
