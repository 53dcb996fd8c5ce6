"""What the results of a run come to: medians, means and intervals of every metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from patchkv_agents.estimates import summary


def summarise(
    config: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    failures: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of summary.json.

    Returns:
        `methods`: method, metric, then `median`, `mean`, `ci` (95 % of the mean, rows drawn
        together) and `n`; booleans count as 0 and 1, and what does not apply is left out of n.
        `edits`: the same by edit. `calibrated_on`: of how many `episodes` the profile of the
        methods was fitted to; None where that is not known of all. `config` and
        `failures` as in their files.
    """
    edits = dict.fromkeys(record["edit"] for record in records)
    return {
        "methods": _by_method(records),
        "edits": {
            edit: _by_method([record for record in records if record["edit"] == edit])
            for edit in edits
        },
        **_calibrated_on(records),
        "config": dict(config),
        "failures": [dict(failure) for failure in failures],
    }


def _calibrated_on(records: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    found = {record["episode"]: record.get("calibrated_on") for record in records}
    unknown = any(seen is None for seen in found.values())
    return {
        "episodes": len(found),
        "calibrated_on": None if unknown else sum(map(bool, found.values())),
    }


def _by_method(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    methods = dict.fromkeys(record["method"] for record in records)
    return {
        method: _metrics(record for record in records if record["method"] == method)
        for method in methods
    }


def _metrics(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    figures: dict[str, list[float]] = {}
    groups: dict[str, list[str]] = {}
    for record in records:
        for name, value in record["metrics"].items():
            if value is not None:
                figures.setdefault(name, []).append(float(value))
                groups.setdefault(name, []).append(record["row"])
    return {name: summary(values, groups=groups[name]) for name, values in figures.items()}
