"""Runs methods over the edited episodes of many rows, and goes on where an earlier run stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError
from patchkv_agents.progress import Progress, ProgressCallback, ignore_progress
from patchkv_agents.recovery import RecoverySetup
from patchkv_evals.datasets import QARow
from patchkv_evals.episodes import (
    Episode,
    EpisodeKind,
    PassagePool,
    RenderedCounter,
    build_episode,
)
from patchkv_evals.errors import EpisodeError
from patchkv_evals.running.methods import MethodRuns, steps_of
from patchkv_evals.running.results import ResultsFolder, Run, sole_writer
from patchkv_evals.running.spec import FULL_PREFILL, RunSpec


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        run: all that the folder holds now.
        episodes_left: that a spent budget left undone.
    """

    run: Run
    episodes_left: int


def run(
    engine: Engine,
    rows: Sequence[QARow],
    methods: Sequence[RecoverySetup],
    spec: RunSpec,
    folder: str | Path,
    *,
    calibrated_on: Callable[[Episode], bool] | None = None,
    budget_minutes: float | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Outcome:
    """Measure methods on edited episodes, beside a full prefill, and write the results.

    A run that was stopped, by whatever, goes on where it was; so does one with more methods, edits
    or a higher limit. What failed is tried again.

    Args:
        engine: runs everything.
        rows: in the order of the data set (see `RunSpec.rows`); they lend each other passages.
        methods: results carry their names.
        spec: what is measured.
        folder: of the results; see `patchkv_evals.running.results`.
        calibrated_on: whether the profile of the methods was fitted to an episode (see
            `patchkv_evals.profiling_pairs.calibrated_on`); None where there is none.
        budget_minutes: no episode begins after so many minutes.
        progress: called before each episode; `done` counts those of earlier runs and those that
            failed.

    Raises:
        DataError: the folder holds another run, its files are damaged, or another process's run
            is writing to it.
        InputError: two methods have the same name, or one that of the full prefill.
    """
    named = {setup.name: setup for setup in methods}
    if len(named) < len(methods) or FULL_PREFILL in named:
        raise InputError(f"give each method once, and a name other than {FULL_PREFILL}")
    config = spec.config(engine, tuple(named))
    with sole_writer(folder):
        results = ResultsFolder(folder, config)
        runner = _Runner(
            engine, rows, named, spec, results, calibrated_on, budget_minutes, progress
        )
        try:
            runner.run()
        finally:  # also when interrupted
            results.write_summary()
        return Outcome(results.run(), runner.left)


class _Runner:
    """One call of `run`."""

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[QARow],
        methods: dict[str, RecoverySetup],
        spec: RunSpec,
        results: ResultsFolder,
        calibrated_on: Callable[[Episode], bool] | None,
        budget_minutes: float | None,
        progress: ProgressCallback,
    ) -> None:
        self._spec, self._results, self._progress = spec, results, progress
        self._rows, self._names = spec.ordered(rows), tuple(methods)
        self._calibrated_on = calibrated_on
        self._pool, self._counter = PassagePool(rows), RenderedCounter(engine.tokenizer)
        self._runs = MethodRuns(
            engine, methods, rounds=spec.rounds, max_new_tokens=spec.max_new_tokens
        )
        self._stop_at = None
        if budget_minutes is not None:
            self._stop_at = time.perf_counter() + 60 * budget_minutes
        self._found = dict.fromkeys(spec.edits, 0)  # episodes of each kind so far
        self._rows_done = 0
        self._is_warm = False
        self.left = 0

    def run(self) -> None:
        """Run what is missing."""
        for row in self._rows:
            try:
                for edit in self._spec.edits:
                    if self._spec.limit is None or self._found[edit] < self._spec.limit:
                        if self._stop_at is not None and time.perf_counter() >= self._stop_at:
                            self.left = self._total() - self._done()
                            return
                        self._row(row, edit)
            finally:
                self._runs.close()
            self._rows_done += 1

    def _row(self, row: QARow, edit: EpisodeKind) -> None:
        """Build the episode of a row and run what is missing of it."""
        self._progress(Progress(f"{edit} of {row.id}", self._done(), self._total()))
        try:
            episode = build_episode(
                row, self._spec.episode(edit), pool=self._pool, counter=self._counter
            )
        except EpisodeError as error:
            self._results.add_failures(
                [{"row": row.id, "edit": edit, "method": None, "reason": str(error)}]
            )
            return
        self._found[edit] += 1
        steps = [step.number for step in steps_of(episode)]
        missing = [
            name
            for name in (FULL_PREFILL, *self._names)
            if not all(self._results.has(episode.id, step, name) for step in steps)
        ]
        if missing:
            if not self._is_warm:
                self._runs.warm_up(episode)
                self._is_warm = True
            lines = list(self._runs.run(episode, [n for n in missing if n != FULL_PREFILL]))
            self._results.add_failures([line for line in lines if "reason" in line])
            seen = None if self._calibrated_on is None else self._calibrated_on(episode)
            self._results.add(
                [{**line, "calibrated_on": seen} for line in lines if "reason" not in line]
            )

    def _done(self) -> int:
        return sum(self._found.values())

    def _total(self) -> int:
        """How many episodes there can be at most."""
        to_come = len(self._rows) - self._rows_done
        limit = self._spec.limit
        return sum(
            found + to_come if limit is None else min(found + to_come, limit)
            for found in self._found.values()
        )
