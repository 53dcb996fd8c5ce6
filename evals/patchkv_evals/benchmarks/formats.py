"""What the stored formats cost: bytes, error, and KL of the next token.

KL (nats, exact || stored) is caused by precision alone: all rows of a context but the last token's
are stored and restored where they were, then that token is computed. Contexts are questions of a
data set with their passages, as many as fit; without data, the demo's episode. Errors are relative
L2 of a row, median over rows and layers.

Points of kind `mix` are the stored formats, and the mix of the default policy: `name`,
`payload_ratio` (to 16 bits, scales and tables counted), `shares` (of blocks, by format),
`contexts`, `kl` (of each), `kl_median`, `kl_mean`. Points of kind `candidate` are the quantisers
among which the formats were chosen, on keys alone or values alone: `of`, `name`, `bits` (of an
element), `error`, `kl` (of each context), `kl_median`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
import numpy.typing as npt
import torch

from patchkv_agents.backends.transformers.capture import (
    PROMPT_QUERIES,
    AttentionCapture,
    sampled_layers,
)
from patchkv_agents.checkpoint.precision import PrecisionPolicy, block_formats
from patchkv_agents.divergence import first_token_kl
from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError
from patchkv_agents.ranges import IntArray, RowSet
from patchkv_evals.benchmarks.contexts import check_data, demo_context
from patchkv_evals.benchmarks.format_candidates import KEYS, VALUES, Candidate
from patchkv_evals.benchmarks.results import BenchResult, Column, number
from patchkv_evals.benchmarks.synthetic import block_ranges
from patchkv_evals.benchmarks.timing import Point, Report, Steps, silent
from patchkv_evals.datasets import QARow, load_rows
from patchkv_kernels import Payload, PayloadFormat, dequantize_scatter, quantize_gather
from patchkv_kernels.rotary import rotate_keys
from patchkv_kernels.row_moves import rotation_table

INSTRUCTION = "Answer the question from the passages. Answer with a few words."


@dataclass(frozen=True, slots=True)
class FormatsConfig:
    """On what formats are compared.

    Attributes:
        data: file of rows; without one, the demo's episode.
        dataset: of the rows.
        limit: contexts.
        tokens: longest context.
        candidates: contexts for the table of quantisers; 0 leaves it out.
        model: name of the engine's model, for the record.

    Raises:
        InputError: a file is named and its data set is not.
    """

    data: str | None = None
    dataset: str | None = None
    limit: int = 12
    tokens: int = 1900
    candidates: int = 0
    model: str = "smollm2"

    def __post_init__(self) -> None:
        check_data(self.data, self.dataset)


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """A computed prompt; keys and values `[layers, kv_heads, tokens, head_dim]`."""

    token_ids: IntArray
    keys: torch.Tensor
    values: torch.Tensor
    scores: npt.NDArray[np.float32]
    logits: torch.Tensor

    @property
    def stored(self) -> int:
        """Rows that are stored: all but the last token's."""
        return len(self.token_ids) - 1

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """Blocks of the stored rows."""
        return block_ranges(self.stored)


@torch.inference_mode()
def formats(engine: Engine, config: FormatsConfig, report: Report = silent) -> BenchResult:
    """Compare the formats, and the candidates if any are wanted.

    Raises:
        InputError: a context does not fit the model, or the data cannot be read.
    """
    bench = FormatsBench(engine)
    prompts = _prompts(engine, config)
    some = prompts[: config.candidates]
    tables = {"keys": KEYS, "values": VALUES} if some else {}
    uniform = [format for format in PayloadFormat if format is not PayloadFormat.NATIVE]
    wanted: list[tuple[str, Callable[[Context], list[PayloadFormat]]]] = [
        *((f"all {format.value}", _all_in(format)) for format in uniform),
        ("default", bench.default_mix),
    ]
    runs = len(some) * sum(map(len, tables.values())) + len(prompts) * (len(wanted) + 10)
    steps = Steps(runs, report)
    contexts = []
    for token_ids in prompts:
        engine.check_length(len(token_ids))
        steps.next(f"prefill of {len(token_ids):,} tokens", 10)
        contexts.append(bench.context(token_ids))
    points = []
    for name, choose in wanted:
        steps.next(name, len(contexts))
        points.append(bench.mix(name, contexts, choose))
    for kind, table in tables.items():
        for candidate in table:
            steps.next(f"{kind}: {candidate.name}", len(some))
            points.append(bench.candidate(kind, candidate, contexts[: len(some)]))
    return BenchResult("formats", asdict(config), points, str(engine.adapter.device))


def _prompts(engine: Engine, config: FormatsConfig) -> list[IntArray]:
    if config.data is None or config.dataset is None:
        return [demo_context(engine.tokenizer, config.tokens).new]
    rows = load_rows(Path(config.data), config.dataset, limit=config.limit).rows
    if not rows:
        raise InputError(f"{config.data} has no row of {config.dataset}: check --dataset")
    return [_prompt(engine, row, config.tokens) for row in rows]


def _prompt(engine: Engine, row: QARow, tokens: int) -> IntArray:
    """A question and as many of its passages as fit into `tokens`."""
    for passages in range(len(row.passages), -1, -1):
        parts = [f"{passage.title}\n{passage.text}" for passage in row.passages[:passages]]
        messages = [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": "\n\n".join([*parts, f"Question: {row.question}"])},
        ]
        ids = engine.tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        if len(ids) <= tokens:
            return np.array(ids, dtype=np.int64)
    raise InputError(
        f"the question of row {row.id} alone has more than {tokens} tokens: use more --tokens"
    )


class FormatsBench:
    """A model, and what formats do on its contexts.

    Args:
        engine: its model lies on one device.
    """

    def __init__(self, engine: Engine) -> None:
        self.rope = engine.rope
        self.adapter = engine.adapter

    def context(self, token_ids: IntArray) -> Context:
        """Compute a prompt."""
        length = len(token_ids)
        cache = self.adapter.new_cache(length)
        capture = AttentionCapture(layers=sampled_layers(self.adapter.scored_layers), prior=None)
        capture.announce(max(0, length - PROMPT_QUERIES), length)
        everything = RowSet.of_range(0, length)
        logits = self.adapter.forward_rows(token_ids, everything, cache, capture=capture)
        (shard,) = cache.shards
        return Context(token_ids, shard.keys, shard.values, capture.scores(length), logits)

    def kl(self, context: Context, keys: torch.Tensor, values: torch.Tensor) -> float:
        """KL of the last token when the rows before it are `keys` and `values`."""
        cache = self.adapter.new_cache(len(context.token_ids))
        (shard,) = cache.shards
        shard.keys.copy_(keys)
        shard.values.copy_(values)
        cache.filled = context.stored
        last = RowSet.of_range(context.stored, context.stored + 1)
        stored = self.adapter.forward_rows(context.token_ids, last, cache)
        return first_token_kl(context.logits, stored)

    def candidate(self, kind: str, candidate: Candidate, contexts: Sequence[Context]) -> Point:
        """Error and KL of keys or values (`kind`) alone."""
        errors, kls = [], []
        for context in contexts:
            rows = slice(0, context.stored)
            keys, values = context.keys.clone(), context.values.clone()
            if kind == "keys":
                exact = self._rotated(keys[:, :, rows], -1)
                kept = candidate.apply(exact)
                keys[:, :, rows] = self._rotated(kept, 1)
            else:
                exact = values[:, :, rows].clone()
                kept = candidate.apply(exact)
                values[:, :, rows] = kept
            errors.append(float(((kept - exact).norm(dim=-1) / exact.norm(dim=-1)).median()))
            kls.append(self.kl(context, keys, values))
        return {
            "kind": "candidate",
            "of": kind,
            "name": candidate.name,
            "bits": candidate.bits(self.adapter.head_dim),
            "error": mean(errors),
            "kl": kls,
            "kl_median": median(kls),
        }

    def _rotated(self, keys: torch.Tensor, direction: int) -> torch.Tensor:
        positions = np.arange(keys.shape[2])
        out = torch.empty_like(keys)
        for layers, rope in self.rope.runs(range(len(keys))):
            part = slice(layers.start, layers.stop)
            cos, sin = rotation_table(rope, 0 * positions, positions, keys.device)
            rotate_keys(keys[part], cos, direction * sin, layout=rope.layout, out=out[part])
        return out

    def mix(
        self,
        name: str,
        contexts: Sequence[Context],
        choose: Callable[[Context], list[PayloadFormat]],
    ) -> Point:
        """Bytes and KL of whole contexts, stored and restored as checkpoints are."""
        ratios, kls = [], []
        counts: Counter[PayloadFormat] = Counter()
        for context in contexts:
            formats = choose(context)
            counts.update(formats)
            keys, values = context.keys.clone(), context.values.clone()
            payload_bytes = 0
            for payload in self._payloads(context, formats):
                payload_bytes += payload.nbytes
                rows, positions = np.arange(payload.rows), payload.row_positions()
                dequantize_scatter(
                    payload, rows, positions, positions, keys, values, rope=self.rope
                )
            shape = context.keys.shape
            ratios.append(payload_bytes / (4 * shape[0] * shape[1] * context.stored * shape[3]))
            kls.append(self.kl(context, keys, values))
        blocks = sum(counts.values())
        shares = {format.value: count / blocks for format, count in counts.items()}
        return {
            "kind": "mix",
            "name": name,
            "payload_ratio": mean(ratios),
            "shares": shares,
            "contexts": len(contexts),
            "kl": kls,
            "kl_median": median(kls),
            "kl_mean": mean(kls),
        }

    def _payloads(self, context: Context, formats: list[PayloadFormat]) -> list[Payload]:
        """One payload for each format; they share their key channels, as in a checkpoint."""
        payloads: list[Payload] = []
        channels: torch.Tensor | None = None
        for format, _ in Counter(formats).most_common():
            own = [
                block
                for block, chosen in zip(context.ranges, formats, strict=True)
                if chosen is format
            ]
            payload = quantize_gather(
                context.keys, context.values, own, format=format, rope=self.rope, channels=channels
            )
            channels = payload.key_channels if channels is None else channels
            payloads.append(payload)
        return payloads

    def default_mix(self, context: Context) -> list[PayloadFormat]:
        """What the default policy chooses."""
        return block_formats(
            PrecisionPolicy(),
            list(context.values),
            context.ranges,
            context.scores[: context.stored],
            tokens=len(context.token_ids),
        )


def _all_in(format: PayloadFormat) -> Callable[[Context], list[PayloadFormat]]:
    return lambda context: [format] * len(context.ranges)


def _shares(point: Point) -> str:
    shares = sorted(point["shares"].items())
    return ", ".join(f"{name} {share:.1%}" for name, share in shares)


COLUMNS = (
    Column("stored", number("name", "")),
    Column("of 16 bits", number("payload_ratio", ".1%")),
    Column("KL median", number("kl_median", ".1e")),
    Column("KL mean", number("kl_mean", ".1e")),
    Column("contexts", number("contexts")),
    Column("blocks", _shares),
)

CANDIDATE_COLUMNS = (
    Column("of", number("of", "")),
    Column("quantiser", number("name", "")),
    Column("bits", number("bits", ".3f")),
    Column("error", number("error", ".5f")),
    Column("KL median", number("kl_median", ".1e")),
)
