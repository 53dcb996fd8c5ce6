"""What a resume may approximate, and how much it recomputes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from patchkv_agents.errors import InputError
from patchkv_agents.recovery.window import WindowModel


class Selection(str, Enum):
    """Which rows of the suffix are recomputed beside dirty window and query tail."""

    BLOCKS = "blocks"
    """Whole blocks, ranked by the largest score of a token in them, and the query tail."""
    TOKENS = "tokens"
    """The tokens with the largest scores, grown to whole blocks, and the query tail: the published
    rule."""
    CONTIGUOUS = "contiguous"
    """None: the window grows by as many rows as `BLOCKS` would recompute, tail included."""
    EDITED = "edited"
    """Whole blocks, ranked by the attention that they gave to what was edited, directly and
    through other blocks; and the query tail."""
    COMBINED = "combined"
    """As `EDITED`, ranked by that mass times the attention that the block received."""
    QUESTION = "question"
    """As `BLOCKS`, ranked by the attention that the last prompt rows of the new context give, as
    far as they are computed; what is computed behind the first block chosen then runs again."""

    @property
    def needs_map(self) -> bool:
        """Whether it asks where the blocks of the old version looked."""
        return self in (Selection.EDITED, Selection.COMBINED)


class BlendScore(str, Enum):
    """By what a blend finds the rows that the edit changed most."""

    VALUE = "value"
    """Squared difference of fresh and restored values, summed over heads and channels."""
    KEY = "key"
    """The same of keys, rotated to their new positions: what LMCache's blender compares."""


class BlendMask(str, Enum):
    """Which keys the rows of a blend see from the check layer on."""

    CAUSAL = "causal"
    """A row sees the keys up to its own position."""
    BOTTOM_RIGHT = "bottom_right"
    """Row i of n sees the keys up to m - n + i of m: what the public code does, in which rows see
    later keys. For comparison only."""


@dataclass(frozen=True, slots=True)
class BlendPolicy:
    """Choosing the rows to recompute while they are computed, as CacheBlend does.

    All rows behind the exact prefix run through the layers in front of the check layer. There the
    fresh keys and values of the suffix are compared with the restored ones, and from there on only
    the rows that differ most run, with the new tokens and the query tail (arXiv 2405.16444,
    sections 4.2 and 4.3).

    Attributes:
        ratio: share of the scored rows, which are the suffix without the query tail, that goes on.
        check_layer: index of the layer that compares, at least 1: nothing differs in layer 0.
        score: what is compared.
        mask: which keys the rows see from there on.

    Raises:
        InputError: a value is out of its range.
    """

    ratio: float = 0.16
    check_layer: int = 1
    score: BlendScore = BlendScore.VALUE
    mask: BlendMask = BlendMask.CAUSAL

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise InputError(f"ratio is {self.ratio}: use 0 to 1")
        if self.check_layer < 1:
            raise InputError(f"check_layer is {self.check_layer}: use 1 or more")


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """How the repair set is chosen.

    Attributes:
        name: how reports call it.
        window_tokens: length of the dirty window behind each edit, in tokens; None recomputes the
            whole suffix, which is exact. With `window_model`, the shortest that it may predict.
        attention_fraction: share of the suffix that may be recomputed because of attention, by
            the rule of `selection` (kappa).
        tail_tokens: length of the query tail, in tokens; 1 is the last token alone, which gives
            the logits and is not grown to a block.
        block_size: unit of repair, in tokens; 1 turns block rounding off.
        selection: which rows are recomputed for their attention.
        blend: chooses further rows while they run, if given.
        window_model: predicts the length of the window behind each edit, if given.
        most_repaired: largest share of the suffix that is recomputed, the tail included, which
            alone may pass it. Where windows would pass it, the blocks nearest to the edits are
            taken. None is no limit.

    Raises:
        InputError: a value is out of its range.
    """

    name: str
    window_tokens: int | None
    attention_fraction: float
    tail_tokens: int
    block_size: int = 32
    selection: Selection = Selection.BLOCKS
    blend: BlendPolicy | None = None
    window_model: WindowModel | None = None
    most_repaired: float | None = None

    def __post_init__(self) -> None:
        if self.window_tokens is not None and self.window_tokens < 0:
            raise InputError(f"window_tokens is {self.window_tokens}: use 0 or more, or None")
        if not 0.0 <= self.attention_fraction <= 1.0:
            raise InputError(f"attention_fraction is {self.attention_fraction}: use 0 to 1")
        if self.tail_tokens < 1:
            raise InputError(f"tail_tokens is {self.tail_tokens}: the last token is always needed")
        if self.name == "exact" and self.window_tokens is not None:
            raise InputError("only a policy without a window may be called exact: choose a name")
        if self.block_size < 1:
            raise InputError(f"block_size is {self.block_size}: use 1 or more")
        if self.most_repaired is not None and not 0.0 < self.most_repaired <= 1.0:
            raise InputError(f"most_repaired is {self.most_repaired}: use more than 0, up to 1")
        if self.window_tokens is None and self.window_model:
            raise InputError(
                "a policy without a window recomputes everything: leave out window_model"
            )
        if self.blend is not None and self.window_tokens is None:
            raise InputError("a policy without a window recomputes everything: leave out blend")

    @property
    def is_exact(self) -> bool:
        """Whether every row behind an edit is recomputed."""
        return self.window_tokens is None

    @classmethod
    def exact(cls) -> RecoveryPolicy:
        """Lossless prefix reuse only: always the results of a full prefill."""
        return cls("exact", window_tokens=None, attention_fraction=0.0, tail_tokens=1, block_size=1)

    @classmethod
    def default(cls) -> RecoveryPolicy:
        """Window, query tail and rows chosen by attention, an eighth of the suffix at most.

        An approximation. Rows are recomputed one by one: grown to whole blocks, a third more of
        them bought nothing. Window and tail are as good as the best where nothing behind the edit
        repeats what was edited. Where something does (a note, an earlier answer, a plan), only the
        few rows that received much attention and looked at the edit help: without them the
        divergence of the first token was up to 60 times larger on Qwen2.5-Coder-0.5B. A profile
        fitted to the model at hand replaces the numbers.
        """
        return cls(
            "patchkv",
            window_tokens=64,
            attention_fraction=0.06,
            tail_tokens=64,
            block_size=1,
            selection=Selection.COMBINED,
            most_repaired=0.125,
        )

    @classmethod
    def published(cls) -> RecoveryPolicy:
        """The paper's method without its offline profile: an approximation.

        The tokens that received most attention (1.5 % of the suffix) are recomputed in whole
        blocks, and of the tail only the last token. The length of the dirty window, which the
        paper predicts for each edit by a regression, is a default here: a profile's `published`
        has a fitted one.
        """
        return cls(
            "patchkv_published",
            window_tokens=128,
            attention_fraction=0.015,
            tail_tokens=1,
            selection=Selection.TOKENS,
        )
