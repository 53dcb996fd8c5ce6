"""What a resume may approximate, and how much it recomputes."""

from __future__ import annotations

from dataclasses import dataclass

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.errors import InputError


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """How the repair set is chosen.

    Attributes:
        name: how reports call it.
        window_tokens: length of the dirty window behind each edit, in tokens; None recomputes the
            whole suffix, which is exact.
        attention_fraction: share of the suffix that may be recomputed because it received much
            attention (kappa), in whole blocks.
        tail_tokens: length of the query tail, in tokens, at least 1: the last token gives the
            logits.
        block_size: unit of repair, in tokens; 1 turns block rounding off.
        precision: chooses the formats in which rows are stored; None stores all of them
            losslessly. What is stored with loss is not exact: an exact recovery computes it again.

    Raises:
        InputError: a value is out of its range.
    """

    name: str
    window_tokens: int | None
    attention_fraction: float
    tail_tokens: int
    block_size: int = 32
    precision: PrecisionPolicy | None = None

    def __post_init__(self) -> None:
        if self.window_tokens is not None and self.window_tokens < 0:
            raise InputError(f"window_tokens is {self.window_tokens}: use 0 or more, or None")
        if not 0.0 <= self.attention_fraction <= 1.0:
            raise InputError(f"attention_fraction is {self.attention_fraction}: use 0 to 1")
        if self.tail_tokens < 1:
            raise InputError(f"tail_tokens is {self.tail_tokens}: the last token is always needed")
        if self.name == "exact" and self.window_tokens is not None:
            raise InputError("only a policy without a window may be called exact: choose a name")
        if self.name == "exact" and self.precision is not None:
            raise InputError("an exact policy stores losslessly: leave out precision")
        if self.block_size < 1:
            raise InputError(f"block_size is {self.block_size}: use 1 or more")

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
        """A fixed window, attention blocks and the query tail: an approximation.

        The sizes are fixed until a profile fitted to the model replaces them.
        """
        return cls(
            "patchkv",
            window_tokens=128,
            attention_fraction=0.015,
            tail_tokens=64,
            precision=PrecisionPolicy(),
        )
