"""How a cost grows: a power law through measured points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from patchkv_evals.errors import DataError

UNIT_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """`time = ms_at_1000 * (tokens / 1000) ** exponent`.

    Attributes:
        exponent: 1 is growth in proportion to the length, 2 to its square.
        ms_at_1000: at 1,000 tokens.
        residual: largest relative difference of a measured time from the law, at least 0.
    """

    exponent: float
    ms_at_1000: float
    residual: float


def power_law(tokens: Sequence[float], times_ms: Sequence[float]) -> PowerLaw:
    """Fit by least squares of the logarithms.

    Args:
        tokens: lengths, at least 3 different ones: through 2 points any law passes.
        times_ms: one for each, greater than 0.

    Raises:
        DataError: there are not enough lengths, or a figure is not greater than 0.
    """
    x, y = np.asarray(tokens, dtype=np.float64), np.asarray(times_ms, dtype=np.float64)
    if len(np.unique(x)) < 3 or len(x) != len(y):
        raise DataError("A fit needs 3 different lengths or more, and a time for each.")
    if x.min() <= 0 or y.min() <= 0:
        raise DataError("A power law is fitted to lengths and times greater than 0.")
    exponent, offset = np.polyfit(np.log(x / UNIT_TOKENS), np.log(y), 1)
    predicted = np.exp(offset) * (x / UNIT_TOKENS) ** exponent
    residual = np.abs(y / predicted - 1).max()
    return PowerLaw(float(exponent), float(np.exp(offset)), float(residual))
