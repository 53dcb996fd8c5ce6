"""Summaries and pooled figures of results made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from patchkv_evals.errors import DataError
from patchkv_evals.running import Pooled, Run, pool
from patchkv_evals.running.summary import summarise


def record(method: str, row: str, ms: float, **changes: Any) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "f1": 0.5,
        "same_answer": True,
        "stale_answer": None,
        "first_token_kl": 0.0,
        "resume_ttft_ms": ms,
    }
    place = {name: changes.pop(name) for name in ("edit", "dataset", "step") if name in changes}
    edit = place.get("edit", "refresh")
    return {
        "episode": f"{row}/{edit}",
        "row": row,
        "edit": edit,
        "dataset": "hotpotqa",
        "step": 0,
        "method": method,
        **place,
        "metrics": {**metrics, **changes},
    }


def run_of(records: list[dict[str, Any]], folder: str = "run", **config: Any) -> Run:
    config = {"model": "tiny", "fingerprint": "f", "tokens": 700, "position": 0.2, **config}
    return Run(Path(folder), config, tuple(records), ())


def rows(
    times: dict[str, list[float]], changes: dict[str, dict[str, Any]] | None = None, **places: Any
) -> list[dict[str, Any]]:
    return [
        record(method, f"row-{row}", ms, **(changes or {}).get(method, {}), **places)
        for method, of_rows in times.items()
        for row, ms in enumerate(of_rows)
    ]


TIMES = {
    "full_prefill": [50.0, 60.0, 70.0],
    "prefix_cache": [40.0, 48.0, 56.0],
    "cacheblend": [16.0, 18.0, 20.0],
    "patchkv": [8.0, 12.0, 10.0],
}


def only(*runs: Run) -> Pooled:
    (pooled,) = pool(runs)
    return pooled


def test_summary_of_hand_made_figures() -> None:
    records = rows(TIMES, {"patchkv": {"first_token_kl": None}})
    records += rows({"patchkv": [100.0]}, edit="flip")
    found = summarise({"model": "tiny"}, records, [{"reason": "none"}])
    patchkv = found["methods"]["patchkv"]
    assert patchkv["resume_ttft_ms"]["median"] == 11
    assert patchkv["resume_ttft_ms"]["mean"] == 32.5
    assert patchkv["resume_ttft_ms"]["n"] == 4
    assert patchkv["same_answer"]["mean"] == 1
    assert patchkv["first_token_kl"]["n"] == 1  # what is not known does not count
    assert "stale_answer" not in patchkv
    assert found["edits"]["refresh"]["patchkv"]["resume_ttft_ms"]["median"] == 10
    assert found["edits"]["flip"].keys() == {"patchkv"}
    assert (found["config"], found["failures"]) == ({"model": "tiny"}, [{"reason": "none"}])


def test_speedups_are_ratios_of_medians() -> None:
    figures = only(run_of(rows(TIMES))).methods["patchkv"]
    assert figures.speedups["prefix_cache"].estimate == pytest.approx(4.8)
    assert figures.speedups["cacheblend"].estimate == pytest.approx(1.8)
    assert figures.speedups["cacheblend"].low <= 1.8 <= figures.speedups["cacheblend"].high
    assert "prefix_cache" not in only(run_of(rows(TIMES))).methods["prefix_cache"].speedups


def test_quality_is_compared_with_the_full_prefill_of_the_same_episode() -> None:
    changes = {"patchkv": {"f1": 0.4, "same_answer": False}, "full_prefill": {"f1": 0.5}}
    figures = only(run_of(rows(TIMES, changes))).methods["patchkv"]
    assert figures.f1_difference is not None and figures.same_answer is not None
    assert figures.f1_difference.estimate == pytest.approx(-10)  # points
    assert figures.same_answer.estimate == 0


def test_a_method_that_failed_on_an_episode_is_compared_on_the_others() -> None:
    records = [r for r in rows(TIMES) if (r["method"], r["row"]) != ("patchkv", "row-1")]
    figures = only(run_of(records)).methods["patchkv"]
    assert figures.n == 2
    assert figures.speedups["prefix_cache"].n == 2
    assert figures.speedups["prefix_cache"].estimate == pytest.approx(48 / 9)


def test_runs_are_pooled_by_model_and_an_episode_counts_once() -> None:
    """Ablations run on some of the same rows again: these do not count double."""
    first, again = run_of(rows(TIMES)), run_of(rows({n: [1.0, 1.0] for n in TIMES}), "again")
    other_edit = run_of(rows(TIMES, edit="flip"), "flip")
    other_model = run_of(rows(TIMES), "other", model="large", fingerprint="g")
    pools = pool([first, again, other_edit, other_model])
    assert [(p.model, len(p.runs), p.episodes, p.rows) for p in pools] == [
        ("tiny", 3, 6, 3),
        ("large", 1, 3, 3),
    ]
    assert pools[0].methods["patchkv"].n == 6
    assert pools[0].methods["patchkv"].speedups["prefix_cache"].estimate == pytest.approx(4.8)


def test_methods_of_different_profiles_are_not_pooled() -> None:
    runs = [run_of(rows(TIMES), name, profile_sha256=name) for name in ("a", "b", "a")]
    pools = pool([*runs, run_of(rows(TIMES))])  # the last one is without
    assert [(len(p.runs), p.methods["patchkv"].n) for p in pools] == [(2, 3), (1, 3), (1, 3)]


def test_the_same_episode_at_another_length_is_another_one() -> None:
    runs = run_of(rows(TIMES)), run_of(rows(TIMES), "long", tokens=4000)
    assert only(*runs).methods["patchkv"].n == 6
    assert only(*runs).episodes == 6


def test_stale_answers_are_counted_where_an_answer_went_stale() -> None:
    changes = {"patchkv": {"stale_answer": True}, "full_prefill": {"stale_answer": False}}
    pooled = only(run_of([*rows(TIMES), *rows(TIMES, changes, edit="flip")]))
    figures = pooled.methods["patchkv"]
    assert (figures.stale_answers, figures.stale_answers_full_prefill, figures.stale_n) == (3, 0, 3)
    assert [t.met for t in pooled.targets() if t.name == "stale answers"] == [False]


def test_targets() -> None:
    met = {t.name: t.met for t in only(run_of(rows(TIMES))).targets()}
    assert met == {
        "resume TTFT against prefix_cache": True,
        "resume TTFT against cacheblend": True,
        "F1 against full prefill, points": True,
        "same answer as full prefill": True,
        "stale answers": None,
    }
    slow = {**TIMES, "patchkv": [12.0, 15.0, 18.0]}
    changes = {"patchkv": {"f1": 0.48, "same_answer": False}}
    met = {t.name: t.met for t in only(run_of(rows(slow, changes))).targets()}
    assert [*met.values()] == [False, False, False, False, None]


def test_a_wide_interval_misses_the_f1_target_whatever_its_mean() -> None:
    records = rows(TIMES)
    for found, f1 in zip(records[-3:], (0.3, 0.5, 0.7), strict=True):
        found["metrics"]["f1"] = f1
    target = next(t for t in only(run_of(records)).targets() if t.name.startswith("F1"))
    assert target.value.startswith("+0.00 [-20.00")
    assert target.met is False


def test_what_is_not_there() -> None:
    pooled = only(run_of(rows({name: TIMES[name] for name in ("full_prefill", "prefix_cache")})))
    with pytest.raises(DataError, match="patchkv"):
        pooled.targets()
    alone = only(run_of(rows({name: TIMES[name] for name in ("full_prefill", "patchkv")})))
    assert [target.met for target in alone.targets()] == [None, None, True, True, None]
    assert pool([]) == ()
