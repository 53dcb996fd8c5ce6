"""`patchkv bench restore`, `formats` and `store`: bytes, divergence and time of stored rows."""

from __future__ import annotations

from patchkv_agents.console import plural
from patchkv_agents.estimates import quantiles
from patchkv_evals.report import numbers
from patchkv_evals.report.blocks import Block, table
from patchkv_evals.report.charts import Bars, Chart, Dot, Line, bars_picture, chart_picture
from patchkv_evals.report.methods import series_style
from patchkv_evals.report.points import plain, timed, timed_text
from patchkv_evals.report.sources import Bench

_FORMATS = {
    "native": "as computed",
    "f16": "16 bits",
    "k8v8": "keys 8, values 8",
    "k8v4": "keys 8, values 4",
    "k4v4": "keys 4, values 4",
    "mixed": "mixed, by attention",
}


def restore_blocks(bench: Bench, name: str) -> list[Block]:
    """Payload and restore time by format: bars at the longest context, a table of all."""
    longest = max(point["tokens"] for point in bench.points)
    shown = [point for point in bench.points if point["tokens"] == longest]
    names = [_FORMATS.get(point["format"], point["format"]) for point in shown]
    sizes = tuple(plain(point, "payload_ratio", scale=100) for point in shown)
    restore = tuple(timed(point, "restore") for point in shown)
    words = "; ".join(
        f"{label}: {size.y:.1f} %, {dot.y:.0f} ms"
        for label, size, dot in zip(names, sizes, restore, strict=True)
    )
    picture = bars_picture(
        name,
        f"Payload and restore time by format at {longest:,} tokens. {words}",
        f"{longest:,} tokens; bars of time reach from the fastest to the slowest round.",
        names,
        [
            Bars("stored bytes, % of 16 bits", sizes, tuple(f"{dot.y:.1f} %" for dot in sizes)),
            Bars("restore, ms (median)", restore, tuple(f"{dot.y:.1f} ms" for dot in restore)),
        ],
    )
    rows = [
        (
            _FORMATS.get(point["format"], point["format"]),
            f"{point['tokens']:,}",
            numbers.megabytes(point["payload_bytes"]),
            numbers.percent(point["payload_ratio"]),
            timed_text(point, "restore"),
            numbers.percent(point["relative"]),
            f"{point['payload_gb_per_s']:.2f}",
            f"{point['rows_gb_per_s']:.2f}",
        )
        for point in bench.points
    ]
    headers = (
        "format",
        "tokens",
        "payload",
        "of 16 bits",
        "restore [range]",
        "of 16 bits' time",
        "GB/s read",
        "GB/s written",
    )
    return [picture, table(headers, rows)]


def formats_blocks(bench: Bench, name: str) -> list[Block]:
    """Divergence against bytes of whole contexts, and the quantisers tried."""
    mixes = [point for point in bench.points if point["kind"] == "mix"]
    candidates = [point for point in bench.points if point["kind"] == "candidate"]
    blocks: list[Block] = []
    if mixes:
        lines = []
        for index, mix in enumerate(mixes):
            x = 100 * mix["payload_ratio"]
            low, high = quantiles(mix["kl"], [0.25, 0.75])
            spread = Dot(x, mix["kl_median"], low, high)
            lines.append(Line(series_style(index, mix["name"]), (spread,)))
        words = "; ".join(
            f"{mix['name']}: {mix['payload_ratio']:.1%}, KL {mix['kl_median']:.1e}" for mix in mixes
        )
        chart = Chart(
            "stored bytes, % of 16 bits",
            "KL of the next token, nats (log)",
            tuple(lines),
            y_scale="kl",
            from_zero=True,
        )
        blocks.append(
            chart_picture(
                name,
                f"Divergence that storage alone causes, by stored bytes. {words}",
                f"Medians, {plural(mixes[0]['contexts'], 'context')}; bars are quartiles.",
                [chart],
            )
        )
        rows = [
            (
                mix["name"],
                numbers.percent(mix["payload_ratio"]),
                numbers.kl(mix["kl_median"]),
                numbers.kl(mix["kl_mean"]),
                str(mix["contexts"]),
                ", ".join(f"{key} {share:.0%}" for key, share in sorted(mix["shares"].items())),
            )
            for mix in mixes
        ]
        headers = ("storage", "bytes of 16 bits", "KL median", "KL mean", "contexts", "blocks")
        blocks.append(table(headers, rows, caption="KL in nats", strong=("default",)))
    if candidates:
        tried = [
            (
                point["name"],
                point["of"],
                f"{point['bits']:.2f}",
                f"{point['error']:.5f}",
                numbers.kl(point["kl_median"]),
            )
            for point in candidates
        ]
        names = ("quantiser", "of", "bits an element", "relative L2 error", "KL median")
        blocks.append(table(names, tried, text_columns=2, caption="Quantisers tried"))
    return blocks


def store_blocks(bench: Bench, name: str) -> list[Block]:
    """Times of saving and loading checkpoints; `name` is not used, there is no figure."""
    rows = [
        (
            point["store"],
            _FORMATS.get(point["mix"], point["mix"]),
            f"{point['tokens']:,}",
            numbers.megabytes(point["payload_bytes"]),
            timed_text(point, "save"),
            timed_text(point, "first_layer"),
            timed_text(point, "load"),
            f"{point['save_gb_per_s']:.2f}",
            f"{point['load_gb_per_s']:.2f}",
        )
        for point in bench.points
    ]
    headers = (
        "store",
        "storage",
        "tokens",
        "payload",
        "save [range]",
        "first layer there [range]",
        "load [range]",
        "GB/s saved",
        "GB/s loaded",
    )
    return [table(headers, rows, text_columns=2)]
