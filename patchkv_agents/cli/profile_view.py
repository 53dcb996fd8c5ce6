"""`patchkv profile show`, and the terminal output of validations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchkv_agents.cli.options import AsJson
from patchkv_agents.console import new_console, plural, print_table
from patchkv_agents.context.excerpts import escaped

if TYPE_CHECKING:
    from rich.console import Console

    from patchkv_agents.checkpoint.precision import PrecisionPolicy
    from patchkv_agents.recovery import WindowModel
    from patchkv_agents.recovery.profile import DataSource, Profile, Validation

_EDITS = (("a number", 4, 4), ("a tool result", 200, 200), ("a summary of a page", 1000, 150))
"""Example edits: name, tokens removed, tokens added."""
_SUFFIXES = (1_000, 4_000, 16_000)

_TABLE_WIDTH = 150
"""Columns of fitted figures, of which there may be a dozen."""
_MAX_LINES = 40
"""Lines of one table of fitted figures; `--json` has them all."""


def show(
    profile: Annotated[
        str,
        typer.Argument(help="File of a profile, or the name of one that comes with the package."),
    ],
    as_json: AsJson = False,
) -> None:
    """Show what a profile holds: policy, what it was fitted to, and whether it has passed."""
    from patchkv_agents.recovery.profile import Profile

    loaded = Profile.load(profile)
    if as_json:
        document = {**loaded.to_json(), "has_passed": loaded.has_passed}
        typer.echo(json.dumps(document))
    else:
        show_profile(new_console(), loaded)


def show_profile(console: Console, profile: Profile) -> None:
    """Print a profile for people."""
    console.print(escaped(f"Profile of {profile.model} ({profile.fingerprint})"))
    console.print(escaped(f"  made {profile.created} by: {profile.command}"))
    for source in profile.data:
        console.print(escaped(f"  made from {_source(source)}"))
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    console.print(escaped(f"  with {versions}"))
    for title, policy in (("Policy", profile.policy), ("As published", profile.published)):
        console.print(f"\n{title} ({policy.name}):")
        for line in policy.method.describe():
            console.print(f"  {line}")
        model = getattr(policy.method, "window_model", None)
        if model is not None:
            least = getattr(policy.method, "window_tokens", 0)
            _show_windows(console, model, least)
    console.print(f"\nStorage, for both: {storage_in_words(profile.storage)}")
    for name, figures in profile.fit.items():
        if name != "calibration_tasks":
            console.print("\n" + escaped(f"{_words(name).capitalize()}:"))
            _show_figures(console, figures)
    console.print("")
    if profile.validation is not None:
        show_validation(console, profile.validation)
    if profile.validation is not None and profile.has_passed:
        console.print("PASSED: an engine with this profile uses its policy.")
        for line in _other_limits(profile.validation):
            console.print(escaped(line))
    else:
        console.print(
            escaped(
                f"NOT PASSED: {profile.why_not_passed}. An engine with this profile recovers "
                f"exactly; run `patchkv validate {profile.model} --profile PROFILE`."
            )
        )


def show_validation(console: Console, validation: Validation) -> None:
    """Print measures and thresholds of a validation, without its verdict."""
    sources = ", ".join(_source(source) for source in validation.data)
    console.print(escaped(f"Validated {validation.created} on {sources}"))
    limits = dict(validation.thresholds)
    lines = []
    for name, measure in validation.measures.items():
        interval = f"{_figure(measure.low)} to {_figure(measure.high)}"
        limit = _figure(limits[name]) if name in limits else ""
        figures = (_figure(measure.value), interval, limit, str(measure.n))
        lines.append((escaped(_words(name)), *figures))
    print_table(console, ("", "value", "95 % interval", "threshold", "n"), lines)


def _other_limits(validation: Validation) -> Iterator[str]:
    """The limits by which it was judged that are not the usual ones, a line for each."""
    from patchkv_agents.profiling.gate import Thresholds

    for name, usual in asdict(Thresholds()).items():
        limit = validation.thresholds.get(name)
        if limit != usual:
            given = "none" if limit is None else f"{limit:g}"
            yield f"  By a limit of its own: {_words(name)} {given}, where {usual:g} is usual."


def storage_in_words(storage: PrecisionPolicy) -> str:
    """How rows are stored."""
    if storage.is_lossless:
        return "rows are stored losslessly"
    if storage.format is not None:
        return f"rows are stored as {storage.format.value}"
    return (
        f"values are stored in 4 bits below risk {storage.tau_low:g} (errors up to "
        f"{storage.tau_4:g}), in 16 bits from {storage.tau_high:g} on, else in 8; "
        f"a block's largest row weighs {storage.alpha:g}, the mean of its rows the rest"
    )


def _show_windows(console: Console, model: WindowModel, least: int) -> None:
    """The predicted length of the window, at least `least` tokens, behind some edits."""
    import numpy as np

    suffixes = np.array(_SUFFIXES, dtype=np.int64)
    lines = []
    for name, old, new in _EDITS:
        removed, brought = (np.full_like(suffixes, size) for size in (old, new))
        lengths = model.lengths(removed, brought, suffixes)
        lengths = np.minimum(np.maximum(lengths, least), suffixes)
        cells = (f"{int(length):,}" for length in lengths)
        lines.append((f"{name} ({old:,} tokens by {new:,})", *cells))
    headers = ("  window behind the edit of", *(f"{suffix:,} behind it" for suffix in _SUFFIXES))
    print_table(console, headers, lines)


def _show_figures(console: Console, figures: Any, indent: int = 2) -> None:
    """Whatever was fitted: figures by name as lines, lists of equal objects as tables."""
    if isinstance(figures, Mapping):
        for name, value in figures.items():
            if _is_plain(value):
                console.print(" " * indent + escaped(f"{_words(name)}: {_plain(value)}"))
            else:
                console.print(" " * indent + escaped(f"{_words(name)}:"))
                _show_figures(console, value, indent + 2)
    elif (
        isinstance(figures, list) and figures and all(isinstance(each, Mapping) for each in figures)
    ):
        console.width = max(console.width, _TABLE_WIDTH)
        fields = dict.fromkeys(key for each in figures for key in each)
        headers = [key for key in fields if all(_is_plain(each.get(key)) for each in figures)]
        lines = [
            [escaped(_plain(each.get(key, ""))) for key in headers] for each in figures[:_MAX_LINES]
        ]
        print_table(console, [escaped(_words(key)) for key in headers], lines)
        if len(figures) > _MAX_LINES:
            console.print(" " * indent + f"and {len(figures) - _MAX_LINES} more: see --json")
    else:
        console.print(" " * indent + escaped(_plain(figures)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return not any(isinstance(each, (Mapping, list)) for each in value)
    return not isinstance(value, Mapping)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _figure(value)
    if isinstance(value, list) and _is_plain(value):
        return ", ".join(_plain(each) for each in value)
    return "" if value is None else str(value)


def _figure(value: float) -> str:
    """Three significant digits; counts in full."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _source(source: DataSource) -> str:
    counts = f"{plural(source.pairs, 'pair')} of {plural(source.tasks, 'task')}"
    return f"{source.name} ({counts}, SHA-256 {source.sha256[:16]})"
