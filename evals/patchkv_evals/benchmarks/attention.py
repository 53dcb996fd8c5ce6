"""What it costs to collect attention scores while a context is prefilled, by length.

Prefills with and without the capture run interleaved, from one set of token ids: the demo's
episode. The time of the capture's own calls is taken too: for a share of a few percent it is the
better figure where times scatter.

A point is one length: `tokens`, `prefill_ms` (capture off), `captured_ms`, each with
`*_rounds_ms`, `overhead` (of the medians: captured / off - 1), `observe_share` (time inside of the
capture's calls / prefill without it; null on a GPU, where calls only queue work).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from patchkv_agents.engine import Engine
from patchkv_agents.engine.capture import PROMPT_QUERIES, AttentionCapture, sampled_layers
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
    spent_ms: list[float] = []

    def prefill(capture: AttentionCapture | None) -> None:
        adapter.forward_rows(token_ids, everything, adapter.new_cache(tokens), capture=capture)

    def captured() -> float:
        capture = _TimedCapture(layers=sampled_layers(adapter.scored_layers), prior=None)
        capture.announce(max(0, tokens - PROMPT_QUERIES), tokens)
        taken = milliseconds(partial(prefill, capture), adapter.device)
        spent_ms.append(capture.spent_ms)
        return taken

    actions: dict[str, Callable[[], float]] = {
        "off": partial(milliseconds, partial(prefill, None), adapter.device),
        "on": captured,
    }
    times = interleaved(actions, rounds)
    off, on = timing("prefill", times["off"]), timing("captured", times["on"])
    own_ms = median(spent_ms[-rounds:])
    return {
        "tokens": tokens,
        **off,
        **on,
        "overhead": on["captured_ms"] / off["prefill_ms"] - 1,
        "observe_share": own_ms / off["prefill_ms"] if adapter.device.type == "cpu" else None,
    }


COLUMNS = (
    Column("tokens", number("tokens")),
    Column("prefill ms", spread("prefill")),
    Column("with capture ms", spread("captured")),
    Column("overhead", number("overhead", "+.1%")),
    Column("inside the capture", number("observe_share", ".2%")),
)
