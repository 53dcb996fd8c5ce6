"""What it costs to collect attention while a context is prefilled, by length.

Prefills without a capture, with one of scores, and with one of scores and the block map run
interleaved, from one set of token ids: the demo's episode. The time of the captures' own calls is
taken too: for a share of a few percent it is the better figure where times scatter.

A point is one length: `tokens`, `prefill_ms` (no capture), `captured_ms` (scores), `mapped_ms`
(scores and block map), each with `*_rounds_ms`; `overhead`, `mapped_overhead` (of the medians: with
/ without - 1), `observe_share`, `mapped_share` (time inside of the capture's calls / prefill
without it; null on a GPU, where calls only queue work).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from patchkv_agents.backends.transformers.capture import (
    PROMPT_QUERIES,
    AttentionCapture,
    sampled_layers,
)
from patchkv_agents.backends.transformers.map_capture import MapCapture, map_layers
from patchkv_agents.engine import Engine
from patchkv_agents.ranges import IntArray, RowSet
from patchkv_evals.benchmarks.contexts import demo_context
from patchkv_evals.benchmarks.results import BenchResult, Column, number, spread
from patchkv_evals.benchmarks.timing import (
    Point,
    Report,
    Steps,
    interleaved,
    milliseconds,
    silent,
    timing,
)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Lengths."""

    tokens: tuple[int, ...] = (1000, 2000, 4000)
    rounds: int = 5
    model: str = "smollm2"


class _TimedCapture(AttentionCapture):
    """Adds up the time that its own calls take."""

    spent_ms = 0.0

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Collect, and take the time."""
        started = time.perf_counter()
        super().observe(*args, **kwargs)
        self.spent_ms += (time.perf_counter() - started) * 1e3


def attention(engine: Engine, config: AttentionConfig, report: Report = silent) -> BenchResult:
    """Measure each length.

    Raises:
        InputError: a length does not fit the model, or is too short for the demo's episode.
    """
    contexts = [demo_context(engine.tokenizer, tokens).new for tokens in config.tokens]
    for token_ids in contexts:
        engine.check_length(len(token_ids))
    steps = Steps(sum(len(token_ids) ** 1.3 for token_ids in contexts), report)
    points: list[Point] = []
    for token_ids in contexts:
        steps.next(f"{len(token_ids):,} tokens", len(token_ids) ** 1.3)
        points.append(_measure(engine, token_ids, config.rounds))
    return BenchResult("attention", asdict(config), points, str(engine.adapter.device))


def _measure(engine: Engine, token_ids: IntArray, rounds: int) -> Point:
    adapter, tokens = engine.adapter, len(token_ids)
    everything = RowSet.of_range(0, tokens)
    spent_ms: dict[str, list[float]] = {"captured": [], "mapped": []}

    def prefill(capture: AttentionCapture | None) -> None:
        adapter.forward_rows(token_ids, everything, adapter.new_cache(tokens), capture=capture)

    def captured(name: str) -> float:
        layers = adapter.scored_layers
        block_map = MapCapture(layers=map_layers(layers), prior=None)
        capture = _TimedCapture(
            layers=sampled_layers(layers),
            prior=None,
            block_map=block_map if name == "mapped" else None,
        )
        capture.announce(max(0, tokens - PROMPT_QUERIES), tokens)
        taken = milliseconds(partial(prefill, capture), adapter.device)
        spent_ms[name].append(capture.spent_ms)
        return taken

    actions: dict[str, Callable[[], float]] = {
        "prefill": partial(milliseconds, partial(prefill, None), adapter.device),
        "captured": partial(captured, "captured"),
        "mapped": partial(captured, "mapped"),
    }
    times = interleaved(actions, rounds)
    point = {"tokens": tokens}
    for name in actions:
        point |= timing(name, times[name])
    on_cpu, prefill_ms = adapter.device.type == "cpu", point["prefill_ms"]
    shares = {
        name: median(spent[-rounds:]) / prefill_ms if on_cpu else None
        for name, spent in spent_ms.items()
    }
    return {
        **point,
        "overhead": point["captured_ms"] / prefill_ms - 1,
        "mapped_overhead": point["mapped_ms"] / prefill_ms - 1,
        "observe_share": shares["captured"],
        "mapped_share": shares["mapped"],
    }


COLUMNS = (
    Column("tokens", number("tokens")),
    Column("prefill ms", spread("prefill")),
    Column("with capture ms", spread("captured")),
    Column("with block map ms", spread("mapped")),
    Column("overhead", number("overhead", "+.1%")),
    Column("with map", number("mapped_overhead", "+.1%")),
    Column("inside the capture", number("observe_share", ".2%")),
    Column("inside, with map", number("mapped_share", ".2%")),
)
