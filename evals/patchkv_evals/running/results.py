"""The files of a run, in one folder.

- `config.json`: what ran, on what: see `Run.config`.
- `results.jsonl`: one object for each episode (each step of a chain) and method.
- `failures.jsonl`: rows that gave no episode, and episodes and methods that failed, with reasons.
- `summary.json`: see `patchkv_evals.running.summary`.

A run may be killed at any time: what belongs to one episode is appended in one write, and a line
that was not written to its end is dropped when the run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from patchkv_agents.files import append_json_lines, drop_torn_line, read_lines, write_atomic
from patchkv_evals.errors import DataError
from patchkv_evals.provenance import SCHEMA
from patchkv_evals.running.summary import summarise

Record = Mapping[str, Any]
"""One line of results.jsonl or failures.jsonl."""

GROWING = ("command", "created", "data", "edits", "methods", "limit")
"""Keys of the configuration that may differ when a run goes on; all others must be equal."""

_CONFIG, _RESULTS, _FAILURES = "config.json", "results.jsonl", "failures.jsonl"
_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class Run:
    """What a folder holds.

    Attributes:
        folder: where.
        config: schema, command, created, dataset, data, data_sha256, profile_sha256, edits,
            methods, model, fingerprint, dtype, limit, tokens, position, seed, rows, rounds,
            max_new_tokens, versions, machine.
        records: episode, row, edit, method, dataset, step (of a chain; 0 otherwise), tokens_old,
            tokens_new, prediction, answers, stale_answers, metrics (see
            `patchkv_evals.running.measures`), rounds_ms, report, calibrated_on (whether the
            methods' profile was fitted to the episode; None where that is not known).
        failures: episode or row, edit, step, method (None where all are concerned) and reason;
            each once, and none of what succeeded later.
    """

    folder: Path
    config: Record
    records: tuple[Record, ...]
    failures: tuple[Record, ...]

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json, from the records."""
        return summarise(self.config, self.records, self.failures)


def holds_run(folder: Path) -> bool:
    """Whether a run has left anything in a folder."""
    left = any((folder / name).is_file() for name in (_RESULTS, _FAILURES))
    return left and (folder / _CONFIG).is_file()


def read_run(folder: str | Path) -> Run:
    """Read what a run has left so far; its files stay as they are.

    Raises:
        DataError: the folder holds no run, or its files are damaged.
    """
    folder = Path(folder)
    config = _read_config(folder)
    if config is None:
        raise DataError(
            f"{folder} holds no {_CONFIG}: name a folder that `patchkv eval --out` has written."
        )
    return _run(folder, config)


@contextmanager
def sole_writer(folder: str | Path) -> Iterator[None]:
    """Keep other processes' runs out of a folder: two would count the same episode twice.

    Raises:
        DataError: another run writes to the folder.
    """
    path = Path(folder) / _LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)  # falls with the process, however that ends
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DataError(
            f"another run is writing to {folder}: wait for its end, or choose another folder."
        ) from None
    try:
        yield
    finally:
        lock.release()


class ResultsFolder:
    """A run's folder, open for writing by a `sole_writer`. Made, or gone on with.

    Args:
        folder: where.
        config: of the run that begins or goes on.

    Raises:
        DataError: the folder holds a run that differs in more than what may grow, or its files
            are damaged.
    """

    def __init__(self, folder: str | Path, config: Record) -> None:
        self._folder = Path(folder)
        found = _read_config(self._folder)
        self._config = dict(config) if found is None else _continued(self._folder, found, config)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._done = {_place(record) for record in self.run().records}
        for name in (_RESULTS, _FAILURES):
            drop_torn_line(self._folder / name)
        _write(self._folder / _CONFIG, self._config)

    def run(self) -> Run:
        """What the folder holds now."""
        return _run(self._folder, self._config)

    def has(self, episode: str, step: int, method: str) -> bool:
        """Whether there is a result."""
        return (episode, step, method) in self._done

    def add(self, records: Sequence[Record]) -> None:
        """Append results, those that are there already left out; they are on disk then."""
        new = [record for record in records if _place(record) not in self._done]
        append_json_lines(self._folder / _RESULTS, new)
        self._done |= {_place(record) for record in new}

    def add_failures(self, failures: Sequence[Record]) -> None:
        """Append failures, those that are there already left out; they are on disk then."""
        known = _records(self._folder / _FAILURES)
        append_json_lines(self._folder / _FAILURES, [new for new in failures if new not in known])

    def write_summary(self) -> dict[str, Any]:
        """Write summary.json, and return its content."""
        summary = self.run().summary
        _write(self._folder / "summary.json", summary)
        return summary


def _run(folder: Path, config: Record) -> Run:
    records, failures = (tuple(_records(folder / name)) for name in (_RESULTS, _FAILURES))
    return Run(folder, config, records, _open_failures(records, failures))


def _place(record: Record) -> tuple[str, int, str]:
    return record["episode"], record["step"], record["method"]


def _open_failures(records: Iterable[Record], failures: Iterable[Record]) -> tuple[Record, ...]:
    """Failures without those repeated and those of what has a result by now."""
    done = {_place(record) for record in records}
    done_steps = {(episode, step) for episode, step, _ in done}
    last: dict[tuple[Any, ...], Record] = {}
    for failure in failures:
        place = failure.get("episode"), failure.get("step", 0)
        method = failure["method"]
        if place in done_steps if method is None else (*place, method) in done:
            continue
        last[place, failure.get("row"), failure["edit"], method] = failure
    return tuple(last.values())


def _continued(folder: Path, found: Record, config: Record) -> dict[str, Any]:
    """The configuration of a run that goes on.

    Raises:
        DataError: it differs in more than what may grow.
    """
    for key in {**found, **config}:
        if key not in GROWING and found.get(key) != config.get(key):
            raise DataError(
                f"{folder} holds a run with {key} {found.get(key)!r}, and this one has "
                f"{config.get(key)!r}: choose another folder, or the same {key}."
            )
    merged = dict(config)
    for key in ("edits", "methods"):
        merged[key] = list(dict.fromkeys((*found[key], *config[key])))
    limits = found["limit"], config["limit"]
    merged["limit"] = None if None in limits else max(limits)
    merged["created"] = found["created"]
    return merged


def _read_config(folder: Path) -> Record | None:
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (folder / _RESULTS).exists():
            raise DataError(f"{folder} holds results without {_CONFIG}: delete it.") from None
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / _CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("schema") != SCHEMA:
        raise DataError(
            f"{folder / _CONFIG} is not of this release's form (schema {SCHEMA}): run again in "
            "another folder."
        )
    return config


def _records(path: Path) -> list[Record]:
    """The records of a file; a last line without its end is not one.

    Raises:
        DataError: a line is not JSON.
    """
    try:
        lines, _ = read_lines(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number} is damaged: delete the line.") from error
    return records


def _write(path: Path, document: Record) -> None:
    write_atomic(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
