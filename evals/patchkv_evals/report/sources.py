"""What a report is made from: folders of `patchkv eval` and files of `patchkv bench`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkv_evals.errors import DataError
from patchkv_evals.provenance import SCHEMA
from patchkv_evals.running.pooled import Pooled, pool
from patchkv_evals.running.results import Record, Run, holds_run, read_run
from patchkv_evals.running.summary import summarise


@dataclass(frozen=True, slots=True)
class SourceRun:
    """A run, and a title that names it among those of its model."""

    run: Run
    title: str


@dataclass(frozen=True, slots=True)
class ModelRuns:
    """The runs of one model on one machine, and its methods compared over all of them."""

    runs: tuple[SourceRun, ...]
    pooled: Pooled

    @property
    def title(self) -> str:
        """Name, number format and device of the model."""
        config = self.runs[0].run.config
        return f"{config['model']}, {config['dtype']}, {config['machine']['device']}"

    @property
    def records(self) -> list[Record]:
        """Results of all runs; what several of them have, as the first has it."""
        found: dict[tuple[Any, ...], Record] = {}
        for source in self.runs:
            config = source.run.config
            for record in source.run.records:
                place = record["episode"], record["step"], record["method"]
                found.setdefault((*place, config["tokens"], config["position"]), record)
        return list(found.values())

    @property
    def summary(self) -> dict[str, Any]:
        """What the results of all runs come to (see `patchkv_evals.running.summary`)."""
        return summarise(self.runs[0].run.config, self.records, [])


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark's file; `document` is all of it."""

    path: Path
    name: str
    config: Mapping[str, Any]
    points: Sequence[dict[str, Any]]
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sources:
    """Runs, those of one model together, and benchmarks."""

    models: tuple[ModelRuns, ...]
    benches: tuple[Bench, ...]

    @property
    def runs(self) -> tuple[SourceRun, ...]:
        """All runs."""
        return tuple(source for model in self.models for source in model.runs)


def read_sources(folders: Iterable[Path]) -> Sources:
    """Read the runs and benchmarks in some folders and in all folders below them.

    Raises:
        DataError: a folder is missing or holds neither, or a file is damaged.
    """
    runs: dict[Path, Run] = {}
    benches: dict[Path, Bench] = {}
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder: name one that 'patchkv eval --out' wrote.")
        inside = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
        found = [each for each in inside if holds_run(each)]
        files = [file for each in inside for file in sorted(each.glob("bench-*.json"))]
        if not found and not files:
            raise DataError(
                f"{folder} holds no results: name folders that 'patchkv eval --out' or "
                "'patchkv bench ... --out' wrote."
            )
        runs |= {each.resolve(): read_run(each) for each in found}
        benches |= {file.resolve(): _read_bench(file) for file in files}
    return Sources(_by_model(runs.values()), tuple(benches.values()))


def provenance_line(document: Mapping[str, Any]) -> str:
    """Machine and versions of a results file in one line."""
    machine, versions = document["machine"], document["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    device = "" if machine["device"] == "cpu" else f"{machine['device']}, "
    return f"{device}{machine['cpu']}, {machine['threads']} threads; {named}"


def _read_bench(path: Path) -> Bench:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise DataError(
                f"{path} has schema {document['schema']}, this version reads {SCHEMA}: run the "
                "benchmark again."
            )
        missing = {"command", "created", "versions", "machine"} - set(document)
        if missing:
            raise KeyError(*missing)
        return Bench(path, document["bench"], document["config"], document["points"], document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a file that 'patchkv bench' wrote ({type(error).__name__}); run the "
            "benchmark again, or move the file elsewhere."
        ) from error


def _by_model(runs: Iterable[Run]) -> tuple[ModelRuns, ...]:
    """Runs of the same weights, number format and profile on the same machine; others never mix."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        config = run.config
        machine = json.dumps(config["machine"], sort_keys=True)
        weights = config["model"], config["fingerprint"], config["dtype"]
        key = *weights, config.get("profile_sha256"), machine
        groups.setdefault(key, []).append(run)
    return tuple(ModelRuns(tuple(_titled(own)), pool(own)[0]) for own in groups.values())


def _titled(runs: Sequence[Run]) -> list[SourceRun]:
    titles = [f"{run.config['dataset']}, {run.config['tokens']:,} tokens" for run in runs]
    return [
        SourceRun(run, title if titles.count(title) == 1 else f"{title} ({run.folder.name})")
        for run, title in zip(runs, titles, strict=True)
    ]
