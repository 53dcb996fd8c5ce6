"""How long it takes to bring stored rows back, by format and length.

Rows are random and have the shape of a model's. They are moved by 5 positions, so that keys must
be rotated, into a cache that was just allocated: the memory's first use counts, as in a resume.

A point is one format at one length: `format` (`mixed` as the default policy stores), `tokens`,
`payload_bytes`, `payload_ratio` (to 16 bits), `restore_ms`, `restore_rounds_ms`, `payload_gb_per_s`
(read), `rows_gb_per_s` (written), `relative` (time to that of `f16`; null without it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch

from patchkv_agents.checkpoint import Checkpoint
from patchkv_agents.checkpoint.shards import CacheShard
from patchkv_agents.errors import InputError
from patchkv_agents.recovery.restore import Restoration
from patchkv_evals.benchmarks.results import BenchResult, Column, number, spread
from patchkv_evals.benchmarks.synthetic import MIXES, RowShape, checkpoint_of
from patchkv_evals.benchmarks.timing import (
    Point,
    Report,
    Steps,
    interleaved,
    milliseconds,
    silent,
    timing,
)

MOVED_BY = 5


@dataclass(frozen=True, slots=True)
class RestoreConfig:
    """What is restored.

    Raises:
        InputError: a format does not exist.
    """

    tokens: tuple[int, ...] = (1000, 4000, 8000)
    formats: tuple[str, ...] = tuple(MIXES)
    shape: RowShape = RowShape()
    rounds: int = 9

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in MIXES:
                raise InputError(f"there is no format '{name}': use some of {', '.join(MIXES)}")


def restore(config: RestoreConfig, report: Report = silent) -> BenchResult:
    """Measure each format at each length."""
    steps = Steps(sum(config.tokens), report)
    points: list[Point] = []
    for tokens in config.tokens:
        steps.next(f"{tokens:,} tokens", tokens)
        points += _measure(config, tokens)
    return BenchResult("restore", asdict(config), points, config.shape.device)


def _measure(config: RestoreConfig, tokens: int) -> Sequence[Point]:
    stored = {name: checkpoint_of(MIXES[name], tokens, config.shape) for name in config.formats}
    times = interleaved(
        {name: partial(_restored_ms, config, checkpoint) for name, checkpoint in stored.items()},
        config.rounds,
    )
    points = []
    rows_bytes = tokens * config.shape.bytes_16 * config.shape.torch_dtype.itemsize // 2
    for name, rounds_ms in times.items():
        time = timing("restore", rounds_ms)
        payload_bytes = stored[name].payload_bytes
        points.append(
            {
                "format": name,
                "tokens": tokens,
                "payload_bytes": payload_bytes,
                "payload_ratio": payload_bytes / (tokens * config.shape.bytes_16),
                **time,
                "payload_gb_per_s": payload_bytes / time["restore_ms"] / 1e6,
                "rows_gb_per_s": rows_bytes / time["restore_ms"] / 1e6,
            }
        )
    base = next((p["restore_ms"] for p in points if p["format"] == "f16"), None)
    return [{**p, "relative": None if base is None else p["restore_ms"] / base} for p in points]


def _restored_ms(config: RestoreConfig, checkpoint: Checkpoint) -> float:
    shape, tokens = config.shape, len(checkpoint)
    device = torch.device(config.shape.device)
    source = np.concatenate([np.full(MOVED_BY, -1), np.arange(tokens)])
    extents = checkpoint.stored_at(source)

    def run() -> None:
        rows = [
            torch.empty(
                (shape.layers, shape.kv_heads, tokens + MOVED_BY, shape.head_dim),
                dtype=shape.torch_dtype,
                device=device,
            )
            for _ in range(2)
        ]
        restoration = Restoration(extents, (CacheShard(0, *rows),), shape.rope)
        for layer in range(shape.layers):
            restoration.ready(layer)

    return milliseconds(run, device)


COLUMNS = (
    Column("tokens", number("tokens")),
    Column("format", number("format", "")),
    Column("of 16 bits", number("payload_ratio", ".1%")),
    Column("restore ms", spread("restore")),
    Column("to f16", number("relative", ".2f")),
    Column("read GB/s", number("payload_gb_per_s", ".2f")),
    Column("written GB/s", number("rows_gb_per_s", ".2f")),
)
