"""The paper's method: a predicted window, and the tokens that received most attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from patchkv_agents.errors import InputError
from patchkv_agents.recovery.methods.base import Method, OldRows, Repair
from patchkv_agents.recovery.methods.rules import Tokens
from patchkv_agents.recovery.methods.window import Window, WindowModel


@dataclass(frozen=True, slots=True)
class Published(Method):
    """Recomputes windows and attended tokens in whole blocks, of the tail only the last token.

    Without an offline profile, the length of the dirty window, which the paper predicts for each
    edit by a regression, is a default.

    Attributes:
        window_tokens: length of the dirty window, in tokens; with `window_model`, the shortest.
        kappa: share of the suffix's tokens that are chosen by attention.
        block_size: unit of repair, in tokens.
        window_model: predicts the length of the window behind each edit, if given.

    Raises:
        InputError: a value is out of its range.
    """

    window_tokens: int = 128
    kappa: float = 0.015
    block_size: int = 32
    window_model: WindowModel | None = None
    kind: Literal["published"] = "published"

    def __post_init__(self) -> None:
        if not 0.0 <= self.kappa <= 1.0:
            raise InputError(f"kappa is {self.kappa}: use 0 to 1")
        self._parts()

    def _parts(self) -> Window:
        return Window(
            self.window_tokens,
            tail_tokens=1,
            block_size=self.block_size,
            rule=Tokens(self.kappa),
            window_model=self.window_model,
        )

    def repair(self, rows: OldRows) -> Repair:
        """Window, last token and attended blocks, without a limit."""
        return self._parts().repair(rows)

    def expected_rows(self, *, new: int, suffix: int, layers: int) -> float:
        """Window, last token and blocks."""
        return self._parts().expected_rows(new=new, suffix=suffix, layers=layers)

    def describe(self) -> Iterator[str]:
        """A line for each part."""
        return self._parts().describe()
