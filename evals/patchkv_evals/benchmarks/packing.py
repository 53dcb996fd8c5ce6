"""What packing the rows of several threads into one forward call could gain, at most.

Rows of several threads need no common context: linear layers would run over all of them at once,
attention once per thread. Here, n times as many rows of one context stand for the rows of n
threads. Linear layers do the same work as they would then, and attention at most as much; what it
costs more in pieces is left out, so the gain is an upper bound.

A point is one number of rows: `rows` (of each thread: 1 is a step of decoding), `in_turn_ms`,
`packed_ms`, each with `*_rounds_ms`, `gain` (in turn / packed, of medians).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError
from patchkv_agents.ranges import RowSet
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
class PackingConfig:
    """How many threads, how long their contexts, and how many rows of each run.

    Raises:
        InputError: there are not as many tokens as rows.
    """

    tokens: int = 2000
    threads: int = 4
    rows: tuple[int, ...] = (1, 8, 32, 64, 128, 256, 500)
    rounds: int = 5
    model: str = "smollm2"

    def __post_init__(self) -> None:
        if self.threads * max(self.rows) > self.tokens:
            raise InputError(
                f"{self.threads} threads of {max(self.rows)} rows need as many tokens: use fewer "
                f"rows, or more --tokens than {self.tokens}"
            )


def packing(engine: Engine, config: PackingConfig, report: Report = silent) -> BenchResult:
    """Run the rows of all threads one thread after the other, and as one.

    Raises:
        InputError: the context does not fit the model, or is too short for the demo's episode.
    """
    token_ids = demo_context(engine.tokenizer, config.tokens).new
    engine.check_length(len(token_ids))
    adapter, tokens = engine.adapter, len(token_ids)
    steps = Steps(sum(config.rows), report)
    cache = adapter.new_cache(tokens)
    adapter.forward_rows(token_ids, RowSet.of_range(0, tokens), cache)

    def run(rows: int, calls: int) -> None:
        last = RowSet.of_range(max(0, tokens - rows), tokens)
        for _ in range(calls):
            adapter.forward_rows(token_ids, last, cache)

    points: list[Point] = []
    for rows in config.rows:
        steps.next(f"{rows} rows of {config.threads} threads", rows)
        actions = {
            "in_turn": partial(run, rows, config.threads),
            "packed": partial(run, rows * config.threads, 1),
        }
        times = interleaved(
            {name: partial(milliseconds, call, adapter.device) for name, call in actions.items()},
            config.rounds,
        )
        in_turn, packed = timing("in_turn", times["in_turn"]), timing("packed", times["packed"])
        gain = in_turn["in_turn_ms"] / packed["packed_ms"]
        points.append({"rows": rows, **in_turn, **packed, "gain": gain})
    return BenchResult("packing", asdict(config), points, str(adapter.device))


COLUMNS = (
    Column("rows of each", number("rows")),
    Column("in turn ms", spread("in_turn")),
    Column("packed ms", spread("packed")),
    Column("gain", number("gain", ".2f")),
)
