"""How an answer is to be made, and tokens into text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypedDict

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from patchkv_agents.context.answers.markers import hidden_tokens
from patchkv_agents.errors import InputError

MAX_LOGPROBS = 20
"""Likeliest tokens that can be asked for with each token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    Of the model's own generation configuration only its end tokens and its repetition penalty
    count: an answer is greedy unless a temperature is given.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy.
        top_p, top_k: nucleus and top-k filters; 1.0 and 0 turn them off.
        min_p: least probability of a token, as a share of the likeliest one's (arXiv 2407.01082).
        repetition_penalty: by which the scores of tokens in prompt and answer shrink (arXiv
            1909.05858, 4.1); 1 turns it off, None is the model's own.
        frequency_penalty, presence_penalty: taken off the score of a token for each time that the
            answer has it, and once if it has it at all; from -2 to 2.
        stop: strings that end the text; they are not part of it.
        seed: makes sampling repeatable; None draws anew.
        logprobs: how many of the likeliest tokens are told with each token's log-probability;
            None tells nothing.
        begin: ids with which the answer begins, whatever the model would say. They count.
        keep_special: special tokens that stay in the text, such as those around tool calls.

    Raises:
        InputError: a value is out of its range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    begin: tuple[int, ...] = ()
    keep_special: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_new_tokens", _is_integer(self.max_new_tokens, 1), "an integer of at least 1"),
            (
                "temperature",
                _is_number(self.temperature)
                and (self.temperature == 0 or 1e-3 <= self.temperature <= 1e6),
                "0 (greedy) or a number from 0.001 to 1,000,000",
            ),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "more than 0, at most 1"),
            ("top_k", _is_integer(self.top_k, 0), "an integer: 0 (off) or more"),
            ("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty is None
                or (_is_number(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100),
                "None (the model's own) or a number from 0.01 to 100; 1 turns it off",
            ),
            ("frequency_penalty", _is_penalty(self.frequency_penalty), "a number from -2 to 2"),
            ("presence_penalty", _is_penalty(self.presence_penalty), "a number from -2 to 2"),
            (
                "logprobs",
                self.logprobs is None
                or (_is_integer(self.logprobs, 0) and self.logprobs <= MAX_LOGPROBS),
                f"None or an integer from 0 to {MAX_LOGPROBS}",
            ),
            (
                "stop",
                all(isinstance(stop, str) and stop for stop in self.stop),
                "strings that are not empty, such as 'END'",
            ),
            (
                "seed",
                self.seed is None or (_is_integer(self.seed, 0) and self.seed < 2**63),
                "None or an integer from 0 to 2**63 - 1",
            ),
            (
                "keep_special",
                all(isinstance(token, str) and token for token in self.keep_special),
                "names of special tokens, such as '<tool_call>'",
            ),
            ("begin", all(_is_integer(token, 0) for token in self.begin), "token ids"),
        )
        for name, is_right, wanted in checks:
            if not is_right:
                raise InputError(f"{name} is {getattr(self, name)!r}: use {wanted}")


def _is_integer(value: object, least: int) -> bool:
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= least


def _is_number(value: object) -> bool:
    return type(value) is not bool and isinstance(value, Real)


def _is_penalty(value: object) -> bool:
    return _is_number(value) and -2 <= value <= 2  # type: ignore[operator]


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments.

    `stop` and `keep_special` may be one string.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float | None
    frequency_penalty: float
    presence_penalty: float
    stop: str | Sequence[str]
    seed: int | None
    logprobs: int | None
    begin: Sequence[int]
    keep_special: str | Sequence[str]


def sampling_params(options: SamplingOptions) -> SamplingParams:
    """Check keyword arguments.

    Raises:
        InputError: an argument is unknown or out of its range.
    """
    known = SamplingParams.__dataclass_fields__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise InputError(f"unknown arguments {unknown}: sampling takes {sorted(known)}")
    values: dict[str, Any] = dict(options)
    for name in {"stop", "begin", "keep_special"} & values.keys():
        given = () if values[name] is None else values[name]
        single = not isinstance(given, Iterable) or isinstance(given, str | bytes)
        values[name] = (given,) if single else tuple(given)
    return SamplingParams(**values)


class TextStream:
    """Decodes tokens one by one into text that never has to be taken back.

    Args:
        tokenizer: of the model.
        stop: strings that end the text.
        keep_special: special tokens that are shown; all others are left out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        keep_special: Collection[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden_tokens(tokenizer, keep_special)
        self._stream = DecodeStream(skip_special_tokens=False)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._text = ""
        self._emitted = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, without a stop string and what follows it."""
        return self._text

    def add(self, token_id: int) -> str:
        """Take one token; return the text that is certain now and was not returned before."""
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        self._text += self._step(token_id)
        matches = [at for at in (self._text.find(stop) for stop in self._stop) if at >= 0]
        if matches:
            self._text, self.stopped = self._text[: min(matches)], True
            return self._take(len(self._text))
        return self._take(len(self._text) - self._held_back())

    def finish(self) -> str:
        """The rest of the text, once there are no more tokens."""
        if not self.stopped:
            self._text += self._decode()[len(self._text) :]
        return self._take(len(self._text))

    def _step(self, token_id: int) -> str:
        """The text that the last of the tokens adds; none inside of a character."""
        if self._tokenizer.is_fast:
            return self._stream.step(self._tokenizer.backend_tokenizer, token_id) or ""
        whole = self._decode()
        return "" if whole.endswith("\ufffd") else whole[len(self._text) :]

    def _decode(self) -> str:
        text = self._tokenizer.decode(
            self._ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _held_back(self) -> int:
        """Length of the end of the text that may be the beginning of a stop string."""
        lengths = [
            length
            for stop in self._stop
            for length in range(1, len(stop))
            if self._text.endswith(stop[:length])
        ]
        return max(lengths, default=0)

    def _take(self, end: int) -> str:
        piece = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece


def end_tokens(tokenizer: PreTrainedTokenizerBase, generation_config: Any) -> frozenset[int]:
    """Ids that end a reply: those of the generation config and the tokenizer's own."""
    configured = getattr(generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured])
    ids.add(tokenizer.eos_token_id)
    return frozenset(token for token in ids if token is not None)
