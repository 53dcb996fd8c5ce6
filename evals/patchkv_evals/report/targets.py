"""What PatchKV is measured by, pooled over the runs of a model, and the methods around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from patchkv_agents.console import plural
from patchkv_evals.report import numbers
from patchkv_evals.report.blocks import Block, Note, Table, Text, few, table
from patchkv_evals.report.methods import CACHEBLEND, PATCHKV, PREFIX_CACHE, in_order
from patchkv_evals.report.sources import ModelRuns
from patchkv_evals.running.pooled import MethodFigures, Pooled, Target

COMPARABLE = 0.9
"""The frontier has methods that were measured on at least this share of the most episodes."""

_VERDICTS = {True: "✓ met", False: "✗ missed", None: "not measured"}


def headline(model: ModelRuns) -> str:
    """The comparison in a sentence."""
    figures = model.pooled.methods.get(PATCHKV)
    if figures is None:
        return f"{model.title}: no result of {PATCHKV}."
    parts = [
        f"{numbers.times_interval(figures.speedups[other])} as fast as {other}"
        for other in (PREFIX_CACHE, CACHEBLEND)
        if other in figures.speedups
    ]
    if figures.f1_difference is not None:
        parts.append(
            f"F1 {numbers.signed_interval(figures.f1_difference)} points from full prefill"
        )
    if figures.same_answer is not None:
        parts.append(f"same answer in {numbers.percent(figures.same_answer.estimate)}")
    episodes = plural(figures.n, "episode")
    rows = plural(model.pooled.rows, "row")
    return f"{model.title}: {PATCHKV} {', '.join(parts)} ({episodes} of {rows}; 95 % intervals)."


def headlines(models: Sequence[ModelRuns]) -> Table:
    """PatchKV on each model in a line."""
    rows = []
    for model in models:
        figures = model.pooled.methods.get(PATCHKV)
        if figures is None:
            rows.append((model.title, *(numbers.NONE,) * 6))
            continue
        verdicts = [target.met for target in model.pooled.targets(PATCHKV)]
        rows.append(
            (
                model.title,
                f"{figures.n} ({model.pooled.rows})",
                numbers.times_interval(figures.speedups.get(PREFIX_CACHE)),
                numbers.times_interval(figures.speedups.get(CACHEBLEND)),
                numbers.signed_interval(figures.f1_difference),
                numbers.percent_interval(figures.same_answer),
                f"{verdicts.count(True)} of {len(verdicts)}",
            )
        )
    headers = (
        "model",
        "episodes (rows)",
        "speed-up over prefix_cache",
        "speed-up over cacheblend",
        "F1 − full prefill's, points",
        "same answer",
        "targets met",
    )
    return table(headers, rows, caption=f"{PATCHKV}, pooled over data sets and edits [95 %]")


def targets_blocks(model: ModelRuns) -> list[Block]:
    """Targets and whether they are met, then all methods with the frontier among them."""
    pooled = model.pooled
    if not pooled.methods:
        return []
    blocks: list[Block] = []
    if PATCHKV in pooled.methods:
        targets = pooled.targets(PATCHKV)
        rows = [(t.name, t.wanted, t.value, _VERDICTS[t.met]) for t in targets]
        blocks.append(
            table(("target", "wanted", f"{PATCHKV} [95 %]", "verdict"), rows, text_columns=4)
        )
        blocks += [_missed(pooled, target) for target in targets if target.met is False]
    note = few(pooled.rows, "rows in all")
    return [*blocks, *([note] if note else []), *_methods(pooled)]


def _missed(pooled: Pooled, missed: Target) -> Note:
    """Which methods do reach a target that PatchKV misses, and at which speed."""
    reach = []
    for name in in_order(pooled.methods):
        met = {target.name for target in pooled.targets(name) if target.met}
        if missed.name in met:
            speed = _speed(name, pooled.methods[name])
            reach.append(name if speed is None else f"{name} at {numbers.times(speed)}")
    who = ", ".join(reach) or "no method here"
    return Note(
        f"Missed: {missed.name}: {missed.value}, wanted {missed.wanted}. Reached by {who} "
        "(speed-up over prefix_cache)."
    )


def _methods(pooled: Pooled) -> list[Block]:
    frontier = _frontier(pooled.methods)
    rows = []
    for name in in_order(pooled.methods):
        figures = pooled.methods[name]
        stale = f"{figures.stale_answers} ({figures.stale_answers_full_prefill})"
        kl = figures.first_token_kl
        rows.append(
            (
                name,
                str(figures.n),
                numbers.times_interval(figures.speedups.get(PREFIX_CACHE)),
                numbers.times_interval(figures.speedups.get(CACHEBLEND)),
                numbers.signed_interval(figures.f1_difference),
                numbers.percent_interval(figures.same_answer),
                f"{stale} of {figures.stale_n}" if figures.stale_n else numbers.NONE,
                numbers.kl(None if kl is None else kl.estimate),
                {True: "yes", False: "", None: numbers.NONE}[frontier.get(name)],
            )
        )
    headers = (
        "method",
        "n",
        "speed-up over prefix_cache",
        "speed-up over cacheblend",
        "F1 − full prefill's",
        "same answer",
        "stale (full prefill's)",
        "KL mean",
        "frontier",
    )
    caption = "All methods, pooled over data sets and edits, with 95 % intervals"
    how = (
        "On the frontier: no other method is at least as fast and as good in equal answers, F1 and "
        "KL, and better in one of these. A dash: measured on fewer episodes than the others, and "
        "not compared."
    )
    return [table(headers, rows, caption=caption, strong=(PATCHKV,)), Text(how)]


def _frontier(methods: Mapping[str, MethodFigures]) -> dict[str, bool]:
    """Whether each comparable method is not beaten in speed, equal answers, F1 and KL."""
    most = max(figures.n for figures in methods.values())
    places: dict[str, tuple[float, ...]] = {}
    for name, figures in methods.items():
        speed, same, f1 = _speed(name, figures), figures.same_answer, figures.f1_difference
        kl = figures.first_token_kl
        if figures.n >= COMPARABLE * most and speed is not None and same and f1 and kl:
            places[name] = (speed, same.estimate, f1.estimate, -kl.estimate)
    return {name: not any(_beats(o, own) for o in places.values()) for name, own in places.items()}


def _beats(other: tuple[float, ...], own: tuple[float, ...]) -> bool:
    return other != own and all(a >= b for a, b in zip(other, own, strict=True))


def _speed(name: str, figures: MethodFigures) -> float | None:
    if name == PREFIX_CACHE:
        return 1.0
    found = figures.speedups.get(PREFIX_CACHE)
    return None if found is None else found.estimate
