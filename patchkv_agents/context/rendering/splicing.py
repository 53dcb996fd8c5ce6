"""Keeps the token ids that the model sampled, where the template shows their text again.

A model does not always sample what its tokenizer makes of the text. Encoded anew, such a reply gets
other ids, and its state and the state of all behind it would be lost.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from typing import Any

import numpy as np

from patchkv_agents.context.rendering.encoding import (
    Control,
    Encoded,
    Encoder,
    IntArray,
    Stretch,
    checked,
)
from patchkv_agents.context.rendering.marks import Piece
from patchkv_agents.context.rendering.sampled import SampledReply
from patchkv_agents.context.texts import common_prefix, common_suffix

# How many pieces of a message, and occurrences of one in a reply, are looked at.
_PIECES = 64
_OCCURRENCES = 8
# Most tokens that make one character together; tokens in front on which decoding may depend.
_CHARACTER = 8
_CONTEXT = 4


def keep_sampled(
    encoder: Encoder,
    tokenizer: Any,
    text: str,
    encoded: Encoded,
    ranges: Sequence[tuple[int, int]],
    pieces: Sequence[Piece],
    sampled: Mapping[int, SampledReply],
) -> Encoded:
    """Put sampled ids in the place of encoded ones, wherever the text is the same.

    A control token of the template stays, unless the same token was sampled at its place.

    Args:
        encoder: the encoder that made `encoded`.
        tokenizer: its tokenizer.
        text: the rendered text.
        encoded: its token ids. Not changed.
        ranges: first character and end of each message.
        pieces: pieces of the messages' content.
        sampled: replies by index of the message.
    """
    if encoded.starts is None or encoded.stops is None or not sampled:
        return encoded
    rendering = _Rendering(encoder, tokenizer, text, encoded)
    own: dict[int, list[Piece]] = {index: [] for index in sampled}
    for piece in pieces:
        if piece.message in own and piece.start < piece.stop:
            own[piece.message].append(piece)
    stretches: list[Stretch] = []
    for index, reply in sampled.items():
        stretches += _stretches(rendering, ranges[index], own[index], reply)
    if not stretches:
        return encoded
    stretches.sort(key=lambda stretch: stretch.start)
    ids, starts, stops = _spliced(rendering, stretches)
    changed = checked(tokenizer, text, replace(encoded, ids=ids, starts=starts, stops=stops))
    return changed if changed.reason == encoded.reason else encoded


class _Rendering:
    """A rendered text with its tokens and control tokens."""

    def __init__(self, encoder: Encoder, tokenizer: Any, text: str, encoded: Encoded) -> None:
        if encoded.starts is None or encoded.stops is None:
            raise ValueError("the places of the tokens are not known")
        self.tokenizer, self.text, self.encoded = tokenizer, text, encoded
        self.starts, self.stops = encoded.starts, encoded.stops
        self.join = partial(encoder.join, tokenizer, text)
        self._control_starts = [control[0] for control in encoded.controls]
        self._control_stops = [control[1] for control in encoded.controls]

    def controls_in(self, start: int, stop: int) -> Sequence[Control]:
        """The control tokens that meet a span of characters."""
        first = bisect_right(self._control_stops, start)
        return self.encoded.controls[first : bisect_left(self._control_starts, stop)]

    def control_before(self, place: int) -> int:
        """Where the last control token before a character ends; 0 if there is none."""
        index = bisect_right(self._control_stops, place)
        return self._control_stops[index - 1] if index else 0

    def control_after(self, place: int) -> int:
        """Where the next control token begins; the text's length if there is none."""
        index = bisect_left(self._control_starts, place)
        known = index < len(self._control_starts)
        return self._control_starts[index] if known else len(self.text)


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """Sampled tokens with their places in their text."""

    text: str
    ids: IntArray
    starts: IntArray
    stops: IntArray


def _stretches(
    rendering: _Rendering, span: tuple[int, int], pieces: Sequence[Piece], reply: SampledReply
) -> Iterator[Stretch]:
    """The stretches of a message that are shown as they were sampled, if encoding lost them."""
    first, last = np.searchsorted(rendering.starts, span)
    ids = np.array(reply.token_ids, dtype=np.int64)
    if _contains(rendering.encoded.ids[first:last], ids):
        return
    anchor = [control[2] for control in rendering.encoded.controls[:1]]
    tokens = _with_places(rendering.tokenizer, ids, anchor)
    if tokens is None:
        return
    longest = nlargest(_PIECES, pieces, key=lambda piece: piece.stop - piece.start)
    done = 0
    for place, said_at, length in _shared(rendering.text, span, tokens.text, longest):
        shift = place - said_at
        controls = rendering.controls_in(place, place + length)
        for a, b in _allowed(tokens, controls, place, place + length, shift):
            one = max(int(np.searchsorted(tokens.starts, a - shift)), done)
            end = int(np.searchsorted(tokens.stops, b - shift, side="right"))
            if one < end:
                yield _stretch(tokens, one, end, shift)
                done = end


def _contains(window: IntArray, ids: IntArray) -> bool:
    """Whether the ids are in the window one after the other."""
    data, wanted = window.tobytes(), ids.tobytes()
    place = data.find(wanted)
    while place % ids.itemsize and place >= 0:
        place = data.find(wanted, place + 1)
    return place >= 0


def _with_places(tokenizer: Any, ids: IntArray, anchor: list[int]) -> _Tokens | None:
    """The tokens with their places; None if it cannot be said which token is what text.

    Text is decoded behind the anchor, since some tokenizers drop a space at the beginning.
    """
    backend = tokenizer.backend_tokenizer

    def decode(*tokens: int) -> str:
        return str(backend.decode([*anchor, *tokens], skip_special_tokens=False))

    head = len(decode())
    whole = decode(*ids.tolist())[head:]
    single = backend.decode_batch(
        [[*anchor, token_id] for token_id in ids.tolist()], skip_special_tokens=False
    )
    lengths = np.array([len(text) - head for text in single])
    if "".join(text[head:] for text in single) == whole:
        stops = lengths.cumsum()
        return _Tokens(whole, ids, stops - lengths, stops)
    # Some characters are made of several tokens, which then all have that character's place.
    starts, stops = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
    done = place = 0
    while done < len(ids):
        context = ids[max(0, done - _CONTEXT) : done].tolist()
        before = len(decode(*context))
        for end in range(done + 1, min(done + _CHARACTER, len(ids)) + 1):
            piece = decode(*context, *ids[done:end].tolist())[before:]
            if not piece.endswith("\ufffd"):
                break
        if not whole.startswith(piece, place):
            return None
        starts[done:end], stops[done:end] = place, place + len(piece)
        done, place = end, place + len(piece)
    return _Tokens(whole, ids, starts, stops) if place == len(whole) else None


def _shared(
    text: str, span: tuple[int, int], said: str, pieces: Sequence[Piece]
) -> list[tuple[int, int, int]]:
    """Stretches that a span of the text and the reply share, in order.

    They are looked for around the pieces of content, the longest ones first.

    Returns:
        First character in the text, first character in the reply, number of characters.
    """
    # Of the text and of the reply: what is not shared yet, with the pieces in it.
    open_spans = [(*span, 0, len(said), pieces)]
    found = []
    while open_spans:
        low, high, said_low, said_high, inside = open_spans.pop()
        for number, piece in enumerate(inside):  # longest first
            core = text[piece.start : piece.stop]
            best: tuple[int, int, int] | None = None
            place = said.find(core, said_low, said_high)
            for _ in range(_OCCURRENCES):
                if place < 0:
                    break
                before = common_suffix(text[low : piece.start], said[said_low:place])
                behind = place + len(core)
                after = common_prefix(text[piece.stop : high], said[behind:said_high])
                length = before + len(core) + after
                if best is None or length > best[2]:
                    best = (piece.start - before, place - before, length)
                place = said.find(core, place + 1, said_high)
            if best is None:
                continue
            found.append(best)
            start, said_start, length = best
            rest = inside[number + 1 :]
            left = [p for p in rest if p.stop <= start]
            right = [p for p in rest if p.start >= start + length]
            open_spans.append((low, start, said_low, said_start, left))
            open_spans.append((start + length, high, said_start + length, said_high, right))
            break
    return sorted(found)


def _allowed(
    tokens: _Tokens, controls: Sequence[Control], start: int, stop: int, shift: int
) -> Iterator[tuple[int, int]]:
    """What remains of a stretch of the text without the control tokens that were not sampled."""
    for a, b, token_id in controls:
        number = int(np.searchsorted(tokens.starts, a - shift))
        if number < len(tokens.ids) and (
            tokens.starts[number] + shift,
            tokens.stops[number] + shift,
            tokens.ids[number],
        ) == (a, b, token_id):
            continue
        if start < a:
            yield start, a
        start = b
    if start < stop:
        yield start, stop


def _stretch(tokens: _Tokens, first: int, end: int, shift: int) -> Stretch:
    places = np.stack((tokens.starts[first:end], tokens.stops[first:end]), axis=1) + shift
    return Stretch(
        int(places[0, 0]), int(places[-1, 1]), tokens.ids[first:end].tolist(), places.tolist()
    )


def _spliced(rendering: _Rendering, stretches: Sequence[Stretch]) -> tuple[IntArray, ...]:
    """Ids, starts and stops with the stretches, which are in order, in their places.

    What is around a stretch is encoded anew, up to the next control tokens: the model saw it
    apart from the reply.
    """
    columns = (rendering.encoded.ids, rendering.starts, rendering.stops)
    parts: list[tuple[IntArray, ...]] = []
    done = 0
    for span, inside in _between_controls(rendering, stretches):
        first, last = np.searchsorted(rendering.starts, span)
        kept = [Stretch.of_control(control) for control in rendering.controls_in(*span)]
        # Only where encoding piece by piece gives what the tokenizer gave.
        if np.array_equal(rendering.join(kept, span)[0], columns[0][first:last]):
            parts.append(tuple(column[done:first] for column in columns))
            parts.append(rendering.join(inside, span))
            done = int(last)
    parts.append(tuple(column[done:] for column in columns))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _between_controls(
    rendering: _Rendering, stretches: Sequence[Stretch]
) -> list[tuple[tuple[int, int], list[Stretch]]]:
    """The spans between control tokens outside of stretches, with the stretches in them."""
    spans: list[tuple[tuple[int, int], list[Stretch]]] = []
    for stretch in stretches:
        low, high = rendering.control_before(stretch.start), rendering.control_after(stretch.stop)
        if spans and low < spans[-1][0][1]:
            spans[-1] = ((spans[-1][0][0], high), [*spans[-1][1], stretch])
        else:
            spans.append(((low, high), [stretch]))
    return spans
