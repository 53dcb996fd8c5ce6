"""What recovery saved against an exact prefix cache: estimated, since only one of both ran."""

from __future__ import annotations

from collections import deque

import numpy as np

from patchkv_agents.engine.outcomes import AnsweredCall
from patchkv_agents.recovery.plan import RowLabel

FEWEST_ROWS = 64
"""Resumes that ran fewer rows say more of their overhead than of the time for a row."""
_REMEMBERED = 32


class SavingsEstimate:
    """Estimates from rows that did not run and measured milliseconds a row.

    The rate is the lower quartile of the last resumes: times include waiting for other threads'
    turns, and an estimate had better be too low.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def ms_per_row(self) -> float | None:
        """Milliseconds for one row; None before there was a resume to measure it by."""
        return float(np.quantile(list(self._rates), 0.25)) if self._rates else None

    def measure(self, answered: AnsweredCall) -> None:
        """Take the rate of a resume into account."""
        rows = len(answered.plan.rows)
        if rows >= FEWEST_ROWS:
            self._rates.append(answered.report.recompute_ms / rows)

    def saved(self, answered: AnsweredCall) -> tuple[int, float | None]:
        """Rows and milliseconds that an exact prefix cache would have needed beyond this resume.

        Rows restored behind the common prefix did not run; planning and restoring took time
        instead. Negative where that was more. None while there is no rate.
        """
        plan, report = answered.plan, answered.report
        rows = int((plan.labels[plan.prefix :] == RowLabel.RESTORED).sum())
        if not rows:
            return 0, 0.0
        rate = self.ms_per_row
        saved_ms = None if rate is None else rows * rate - report.planning_ms - report.restore_ms
        return rows, saved_ms
