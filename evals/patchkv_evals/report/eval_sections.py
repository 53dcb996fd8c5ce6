"""The part of the page that shows the evaluation of one model."""

from __future__ import annotations

from collections.abc import Sequence

from patchkv_agents.console import plural
from patchkv_evals.report.blocks import Block, Section, Text
from patchkv_evals.report.eval_figures import ablation_picture, panel, quality_picture
from patchkv_evals.report.eval_tables import METRICS_NOTE, differences, few_rows, run_table
from patchkv_evals.report.methods import PATCHKV, PREFIX_CACHE, REFERENCE, style_of
from patchkv_evals.report.sources import Evaluated, ModelRuns
from patchkv_evals.report.targets import targets_blocks

PANELS = 3
"""Runs side by side in one figure."""

_BESIDE = {REFERENCE, PREFIX_CACHE, PATCHKV}
"""Shown beside ablations; a run that has ablations and no others than these is about ablations."""


def model_section(model: ModelRuns, name: str) -> Section:
    """Targets, quality against time, tables and ablations of one model; `name` is its anchor."""
    title = model.title
    measured = [evaluated for evaluated in model.runs if evaluated.run.records]
    main = [evaluated for evaluated in measured if not _only_ablations(evaluated)]
    parts = [
        Section("Targets", f"{name}-targets", tuple(targets_blocks(model))),
        Section("Quality against time", f"{name}-quality", tuple(_quality(main, title, name))),
        Section("By data set and edit", f"{name}-tables", tuple(_tables(main))),
    ]
    ablated = [evaluated for evaluated in measured if _ablations(evaluated)]
    if ablated:
        blocks = _ablation_blocks(ablated, title, name)
        parts.append(Section("Ablations", f"{name}-ablations", tuple(blocks)))
    parts.append(
        Section("Answers that differ", f"{name}-answers", tuple(differences(main or measured)))
    )
    shown = tuple(part for part in parts if part.blocks)
    return Section(title, name, tuple(_head(model.runs)), shown)


def _head(runs: Sequence[Evaluated]) -> list[Block]:
    config = runs[0].run.config
    records = [record for evaluated in runs for record in evaluated.run.records]
    if not records:
        return [Text("No method gave a result: see the failures below.")]
    datasets = dict.fromkeys(evaluated.run.config["dataset"] for evaluated in runs)
    edits = dict.fromkeys(record["edit"] for record in records)
    rows = {(record["dataset"], record["row"]) for record in records}
    lengths = [record["tokens_new"] for record in records]
    profile = config.get("profile_sha256")
    return [
        Text(
            f"{plural(len(rows), 'row')} of {', '.join(datasets)}, edited by {', '.join(edits)}; "
            f"contexts of {min(lengths):,} to {max(lengths):,} tokens. Weights "
            f"{config['fingerprint']}."
            + (f" Methods from the profile with policies {profile[:16]}." if profile else "")
        )
    ]


def _quality(runs: Sequence[Evaluated], title: str, name: str) -> list[Block]:
    panels = []
    for evaluated in runs:
        entries = {name: evaluated.summary["methods"][name] for name in _main(evaluated)}
        each = panel(evaluated.title, evaluated.run.records, entries)
        if each.methods:
            panels.append(each)
    parts = [panels[place : place + PANELS] for place in range(0, len(panels), PANELS)]
    return [
        quality_picture(f"{name}-quality-{number}", title, part)
        for number, part in enumerate(parts, start=1)
    ]


def _tables(runs: Sequence[Evaluated]) -> list[Block]:
    blocks: list[Block] = [Text(METRICS_NOTE)] if runs else []
    for evaluated in runs:
        note = few_rows(evaluated)
        blocks += [run_table(evaluated, _main(evaluated)), *([note] if note else [])]
    return blocks


def _main(evaluated: Evaluated) -> list[str]:
    return [name for name in evaluated.summary["methods"] if not style_of(name).ablation]


def _only_ablations(evaluated: Evaluated) -> bool:
    return bool(_ablations(evaluated)) and set(_main(evaluated)) <= _BESIDE


def _ablations(evaluated: Evaluated) -> list[str]:
    return [name for name in evaluated.summary["methods"] if style_of(name).ablation]


def _ablation_blocks(runs: Sequence[Evaluated], title: str, name: str) -> list[Block]:
    blocks: list[Block] = []
    for index, evaluated in enumerate(runs, start=1):
        methods = [*_BESIDE, *_ablations(evaluated)]
        entries = {m: e for m, e in evaluated.summary["methods"].items() if m in methods}
        each = panel(evaluated.title, evaluated.run.records, entries)
        if each.methods:
            blocks.append(ablation_picture(f"{name}-ablations-{index}", title, each))
        blocks.append(run_table(evaluated, methods))
        note = few_rows(evaluated)
        blocks += [note] if note else []
    return blocks
