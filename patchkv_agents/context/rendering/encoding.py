"""Turns a rendered context into token ids, so that content never becomes a control token."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from patchkv_agents.context.rendering.marks import Piece

# Stands for a look-alike for a moment. In no control token.
_MASK = "\ue000"

# After so many rounds, all content around what is still a control token is masked.
_MASK_ROUNDS = 3

IntArray = NDArray[np.int64]
Control = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """A stretch of the text whose token ids are known.

    Attributes:
        start: first character.
        stop: the character behind the last one.
        ids: token ids.
        offsets: first character and end of each token, in the whole text.
    """

    start: int
    stop: int
    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]

    @classmethod
    def of_control(cls, control: Control) -> Stretch:
        """The stretch of a control token."""
        start, stop, token_id = control
        return cls(start, stop, (token_id,), ((start, stop),))


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Token ids of a text.

    Attributes:
        ids: token ids, int64 [tokens].
        starts: where each token begins in the text, int64 [tokens], ascending; None if unknown.
        stops: where each token ends, int64 [tokens], ascending; None if unknown.
        controls: the control tokens: first character, the one behind the last, token id.
        reason: why the ids may not stand for the text; None if they do.
    """

    ids: IntArray
    starts: IntArray | None
    stops: IntArray | None
    controls: tuple[Control, ...]
    reason: str | None = None


class Encoder:
    """Encodes text with one tokenizer (use `Encoder.of`, which keeps them).

    Control tokens are the added tokens that are special, that the chat template uses, or that
    look like them (`<|...|>`). The other added tokens, such as Gemma's line breaks, are text.

    Args:
        tokenizer: a Transformers tokenizer, preferably a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        # Not kept: this object lives in a dictionary from which the tokenizer can disappear.
        self.template = tokenizer.chat_template
        source = json.dumps(self.template, ensure_ascii=False)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._control_of_id = {
            int(token_id): str(token.content)
            for token_id, token in added.items()
            if _is_control(str(token.content), bool(token.special), source)
        }
        self._unknown = getattr(tokenizer, "unk_token", None)
        self._unknown_id = -1 if self._unknown is None else int(tokenizer.unk_token_id)
        self._control_ids = np.array(sorted(self._control_of_id), dtype=np.int64)
        self.controls = sorted(self._control_of_id.values(), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.controls)) or r"(?!)")
        self._plain_backend: Any = None

    @staticmethod
    def of(tokenizer: Any) -> Encoder:
        """The encoder of this tokenizer, made anew if its chat template was changed."""
        encoder = _encoders.get(tokenizer)
        if encoder is None or encoder.template != tokenizer.chat_template:
            encoder = _encoders[tokenizer] = Encoder(tokenizer)
        return encoder

    def has_lookalike(self, text: str) -> bool:
        """Whether the text holds the text of a control token."""
        return self._pattern.search(text) is not None

    def encode(self, tokenizer: Any, text: str, pieces: Sequence[Piece]) -> Encoded:
        """Token ids of `text`; control tokens are only those outside of the pieces of content."""
        if not getattr(tokenizer, "is_fast", False):
            output = tokenizer(text, add_special_tokens=False, verbose=False)
            ids = np.array(output["input_ids"], dtype=np.int64)
            reason = "the tokenizer is a slow one, which does not say where its tokens are"
            return Encoded(ids, None, None, (), reason)
        masked, encoded = self._mask_lookalikes(tokenizer, text, pieces)
        if masked != text:
            encoded = self._encode_between(tokenizer, text, masked, encoded)
        return checked(tokenizer, text, encoded)

    def _encode_all(self, tokenizer: Any, text: str) -> Encoded:
        """What the tokenizer makes of the text, look-alikes included."""
        output = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids = np.array(output["input_ids"], dtype=np.int64)
        offsets = _places(output["offset_mapping"])
        # An unknown character may have the id of an added token too: then it is not that text.
        controls = tuple(
            (int(offsets[index, 0]), int(offsets[index, 1]), int(ids[index]))
            for index in np.flatnonzero(np.isin(ids, self._control_ids))
            if ids[index] != self._unknown_id or text[slice(*offsets[index])] == self._unknown
        )
        return Encoded(ids, offsets[:, 0], offsets[:, 1], controls)

    def _mask_lookalikes(
        self, tokenizer: Any, text: str, pieces: Sequence[Piece]
    ) -> tuple[str, Encoded]:
        """The text with look-alikes in content made harmless, and its tokens."""
        # Nearly all look-alikes are plain occurrences, and one sweep finds them; only where the
        # tokenizer normalises text, or content and template make one together, are there others.
        plain = _within(pieces, (match.span() for match in self._pattern.finditer(text)))
        masked = _masked(text, plain)
        encoded = self._encode_all(tokenizer, masked)
        rounds = 1
        while found := _in_content(encoded.controls, pieces):
            spots = [control[:2] for control in found]
            if rounds >= _MASK_ROUNDS:
                spots += [(piece.start, piece.stop) for piece in _touched(pieces, found)]
            masked = _masked(masked, sorted(spots))
            encoded = self._encode_all(tokenizer, masked)
            rounds += 1
        return masked, encoded

    def _encode_between(
        self, tokenizer: Any, text: str, masked: str, reference: Encoded
    ) -> Encoded:
        """Encode what is between control tokens without added tokens.

        The way is tried on the masked text first, where the tokenizer itself gives the answer.
        """
        controls = [Stretch.of_control(control) for control in reference.controls]
        whole = (0, len(text))
        encoded = Encoded(*self.join(tokenizer, text, controls, whole), reference.controls)
        same, _, _ = self.join(tokenizer, masked, controls, whole)
        in_text = np.isin(encoded.ids, self._control_ids) & (encoded.ids != self._unknown_id)
        known = sum(control[2] != self._unknown_id for control in reference.controls)
        if np.array_equal(same, reference.ids) and np.count_nonzero(in_text) == known:
            return encoded
        reason = (
            "content holds text like a control token, and this tokenizer cannot be used piece by "
            "piece"
        )
        return replace(encoded, reason=reason)

    def join(
        self, tokenizer: Any, text: str, known: Sequence[Stretch], span: tuple[int, int]
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Token ids of a span of the text: of the known stretches, and of what is between them.

        What is between is encoded piece by piece, and nothing in it becomes a control token. The
        stretches are in order and within the span.

        Returns:
            Token ids, starts and stops, int64 [tokens]; places are those in the whole text.
        """
        borders = [span[0], *(place for one in known for place in (one.start, one.stop)), span[1]]
        gaps = list(zip(borders[::2], borders[1::2], strict=True))
        encodings = self._plain(tokenizer).encode_batch(
            [text[start:stop] for start, stop in gaps], add_special_tokens=False
        )
        ids: list[int] = []
        offsets: list[IntArray] = []
        for number, ((start, _), encoding) in enumerate(zip(gaps, encodings, strict=True)):
            ids += encoding.ids
            offsets.append(_places(encoding.offsets) + start)
            if number < len(known):
                ids += known[number].ids
                offsets.append(_places(known[number].offsets))
        places = np.concatenate(offsets)
        return np.array(ids, dtype=np.int64), places[:, 0], places[:, 1]

    def _plain(self, tokenizer: Any) -> Any:
        """A fast tokenizer on the same model to which control tokens are text."""
        if self._plain_backend is None:
            backend = tokenizer.backend_tokenizer
            plain = type(backend)(backend.model)  # shares the model, so this takes no time
            if backend.normalizer is not None:
                plain.normalizer = backend.normalizer
            if backend.pre_tokenizer is not None:
                plain.pre_tokenizer = _never_first(deepcopy(backend.pre_tokenizer))
            added = backend.get_added_tokens_decoder().items()
            plain.add_tokens([t for token_id, t in added if token_id not in self._control_of_id])
            self._plain_backend = plain
        return self._plain_backend


_encoders: WeakKeyDictionary[Any, Encoder] = WeakKeyDictionary()


def _places(offsets: Sequence[tuple[int, int]]) -> IntArray:
    """Places of tokens, int64 [tokens, 2]."""
    return np.array(offsets, dtype=np.int64).reshape(-1, 2)


def _is_control(content: str, special: bool, template: str) -> bool:
    if special:
        return True
    return "|" in content or "｜" in content or (content in template and not content.isspace())


def _in_content(controls: Sequence[Control], pieces: Sequence[Piece]) -> list[Control]:
    """The control tokens that meet a piece; pieces are in order and do not overlap."""
    stops = [piece.stop for piece in pieces]
    found = []
    for control in controls:
        index = bisect_right(stops, control[0])  # the first piece that ends behind its beginning
        if index < len(pieces) and pieces[index].start < control[1]:
            found.append(control)
    return found


def _touched(pieces: Sequence[Piece], controls: Sequence[Control]) -> list[Piece]:
    """The pieces that meet a control token; controls are in order and do not overlap."""
    stops = [stop for _, stop, _ in controls]
    found = []
    for piece in pieces:
        index = bisect_right(stops, piece.start)
        if index < len(controls) and controls[index][0] < piece.stop:
            found.append(piece)
    return found


def _within(pieces: Sequence[Piece], spots: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spots that meet a piece."""
    return [control[:2] for control in _in_content([(a, b, -1) for a, b in spots], pieces)]


def _masked(text: str, spots: Sequence[tuple[int, int]]) -> str:
    """The text with these spots, in order of their starts, made harmless."""
    parts = []
    done = 0
    for start, stop in spots:
        if stop > done:
            start = max(start, done)
            parts += [text[done:start], _MASK * (stop - start)]
            done = stop
    return "".join((*parts, text[done:]))


def _never_first(pre_tokenizer: Any) -> Any:
    """Let no text count as the first one, in front of which SentencePiece puts a space."""
    if getattr(pre_tokenizer, "prepend_scheme", None) == "first":
        pre_tokenizer.prepend_scheme = "never"
    if hasattr(pre_tokenizer, "__getitem__"):
        for inner in pre_tokenizer:
            _never_first(inner)
    return pre_tokenizer


def checked(tokenizer: Any, text: str, encoded: Encoded) -> Encoded:
    """With starts that leave no gaps, and the reason if the ids do not stand for the whole text."""
    if encoded.starts is None or encoded.stops is None:
        return encoded
    ends = np.maximum.accumulate(encoded.stops)
    before = np.concatenate(([0], ends[:-1])) if ends.size else ends
    gaps = [(before[k], encoded.starts[k]) for k in np.flatnonzero(before < encoded.starts)]
    gaps.append((ends[-1] if ends.size else 0, len(text)))
    # White space may belong to no token (some tokenizers trim offsets); other text may not.
    uncovered = "".join("".join(text[a:b].split()) for a, b in gaps)
    reason = encoded.reason
    if uncovered and not (_decodes(tokenizer, text, encoded.ids) or _unknown(tokenizer, uncovered)):
        reason = "the token ids do not stand for all of the rendered text"
    starts = np.maximum.accumulate(np.minimum(encoded.starts, before)) if ends.size else ends
    return Encoded(encoded.ids, starts, ends, encoded.controls, reason)


def _decodes(tokenizer: Any, text: str, ids: IntArray) -> bool:
    """Whether the ids decode to the text, as it is or as the tokenizer normalises it."""
    decoded = tokenizer.decode(
        ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    normalizer = tokenizer.backend_tokenizer.normalizer
    return decoded == text or bool(normalizer and decoded == normalizer.normalize_str(text))


def _unknown(tokenizer: Any, text: str) -> bool:
    """Whether the vocabulary has nothing for any character (SmolLM2's lacks some control codes)."""
    return not any(tokenizer(c, add_special_tokens=False)["input_ids"] for c in set(text))
