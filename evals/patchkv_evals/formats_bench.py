"""What the stored formats cost: error by byte, KL of the next token by bytes, time to restore.

    python -m patchkv_evals.formats_bench --data hotpotqa.jsonl [--model smollm2] [--rows 12]
                                          [--tokens 1900] [--candidates 3] [--json FILE]

KL (nats, exact || stored) is caused by precision alone: all rows of a context but the last token's
are stored and restored where they were, then that token is computed. Contexts are questions with
their passages, as many as fit. Errors are relative L2 of a row, median over rows and layers.
Restore times are of 4,096 random rows in the model's shapes, moved by 5 positions into a cache
that was just allocated, formats interleaved; figures are medians with the smallest and largest.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from patchkv_agents.checkpoint.precision import PrecisionPolicy, block_formats
from patchkv_agents.engine.adapter import ModelAdapter
from patchkv_agents.engine.capture import PROMPT_QUERIES, AttentionCapture, sampled_layers
from patchkv_agents.engine.loading import load_model
from patchkv_agents.engine.support import rope_of
from patchkv_agents.ranges import RowSet
from patchkv_evals.datasets.loading import load_rows
from patchkv_evals.datasets.rows import QARow
from patchkv_evals.format_candidates import BLOCK, KEYS, VALUES, Candidate
from patchkv_kernels import Payload, PayloadFormat, Rope, dequantize_scatter, quantize_gather
from patchkv_kernels.rotary import rotate_keys
from patchkv_kernels.row_moves import rotation_table

RESTORED_ROWS = 4096
INSTRUCTION = "Answer the question from the passages. Answer with a few words."
_IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """A computed prompt; keys and values `[layers, kv_heads, tokens, head_dim]`."""

    token_ids: _IntArray
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
        starts = range(0, self.stored, BLOCK)
        return [(start, min(start + BLOCK, self.stored), start) for start in starts]


@dataclass(frozen=True, slots=True)
class CandidateFigures:
    """One line of the error table."""

    name: str
    bits: float
    error: float
    kl: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MixFigures:
    """One point of bytes against KL; shares are of blocks, by format."""

    name: str
    payload_ratio: float
    shares: dict[str, float]
    kl: tuple[float, ...]


class FormatsBench:
    """A model, and the contexts on which formats are compared."""

    def __init__(self, model_name: str) -> None:
        model, self._tokenizer = load_model(model_name, device="cpu")
        self.rope: Rope = rope_of(model)
        self.adapter = ModelAdapter(model)

    def context(self, row: QARow, tokens: int) -> Context:
        """Compute the prompt of a row, with as many passages as fit into `tokens`."""
        token_ids = self._prompt(row, tokens)
        length = len(token_ids)
        cache = self.adapter.new_cache(length)
        capture = AttentionCapture(
            layers=sampled_layers(self.adapter.scored_layers),
            prior=None,
            device=self.adapter.device,
        )
        capture.announce(max(0, length - PROMPT_QUERIES), length)
        everything = RowSet.of_range(0, length)
        logits = self.adapter.forward_rows(token_ids, everything, cache, capture=capture)
        return Context(token_ids, cache.keys, cache.values, capture.scores(length), logits)

    def _prompt(self, row: QARow, tokens: int) -> _IntArray:
        for passages in range(len(row.passages), -1, -1):
            parts = [f"{passage.title}\n{passage.text}" for passage in row.passages[:passages]]
            messages = [
                {"role": "system", "content": INSTRUCTION},
                {"role": "user", "content": "\n\n".join([*parts, f"Question: {row.question}"])},
            ]
            ids = self._tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
            if len(ids) <= tokens:
                return np.array(ids, dtype=np.int64)
        raise SystemExit(f"the question of row {row.id} alone has more than {tokens} tokens")

    def kl(self, context: Context, keys: torch.Tensor, values: torch.Tensor) -> float:
        """KL of the last token when the rows before it are `keys` and `values`."""
        cache = self.adapter.new_cache(len(context.token_ids))
        cache.keys.copy_(keys)
        cache.values.copy_(values)
        cache.filled = context.stored
        last = RowSet.of_range(context.stored, context.stored + 1)
        stored = self.adapter.forward_rows(context.token_ids, last, cache)
        exact, approximate = (
            logits.double().log_softmax(-1) for logits in (context.logits, stored)
        )
        return float((exact.exp() * (exact - approximate)).sum())

    def candidate(
        self, kind: str, candidate: Candidate, contexts: Sequence[Context]
    ) -> CandidateFigures:
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
        bits = candidate.bits(self.adapter.head_dim)
        return CandidateFigures(candidate.name, bits, mean(errors), tuple(kls))

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
    ) -> MixFigures:
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
        return MixFigures(name, mean(ratios), shares, tuple(kls))

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
            context.keys,
            context.values,
            context.ranges,
            context.scores[: context.stored],
            tokens=len(context.token_ids),
            rope=self.rope,
        )

    def restore_ms(self, shares: dict[str, float], rounds: int) -> dict[str, list[float]]:
        """Milliseconds to restore rows by format; `mix` has blocks of the formats by `shares`."""
        adapter, generator = self.adapter, torch.Generator().manual_seed(0)
        shape = (adapter.layers, adapter.kv_heads, RESTORED_ROWS, adapter.head_dim)
        keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
        blocks = np.arange(RESTORED_ROWS // BLOCK)
        names = [PayloadFormat.F16, PayloadFormat.K8V8, PayloadFormat.K8V4]
        drawn = np.random.default_rng(0).choice(
            len(names), len(blocks), p=[shares.get(name.value, 0.0) for name in names]
        )
        stores = {name.value: [(name, blocks)] for name in names}
        stores["mix"] = [(name, blocks[drawn == index]) for index, name in enumerate(names)]
        payloads = {
            name: [
                self._stored_blocks(keys, values, format, own) for format, own in parts if len(own)
            ]
            for name, parts in stores.items()
        }
        times: dict[str, list[float]] = {name: [] for name in payloads}
        for _ in range(rounds + 1):
            for name, parts in payloads.items():
                started = time.perf_counter()
                cache = adapter.new_cache(RESTORED_ROWS + BLOCK)
                for payload in parts:
                    rows, positions = np.arange(payload.rows), payload.row_positions() + 5
                    dequantize_scatter(
                        payload,
                        rows,
                        positions,
                        positions,
                        cache.keys,
                        cache.values,
                        rope=self.rope,
                    )
                times[name].append((time.perf_counter() - started) * 1e3)
        return {name: each[1:] for name, each in times.items()}

    def _stored_blocks(
        self, keys: torch.Tensor, values: torch.Tensor, format: PayloadFormat, blocks: _IntArray
    ) -> Payload:
        ranges = [(int(b) * BLOCK, int(b) * BLOCK + BLOCK, int(b) * BLOCK) for b in blocks]
        return quantize_gather(keys, values, ranges, format=format, rope=self.rope)


def _all_in(format: PayloadFormat) -> Callable[[Context], list[PayloadFormat]]:
    return lambda context: [format] * len(context.ranges)


def _kl(values: Sequence[float]) -> str:
    return f"{median(values):.2e} (mean {mean(values):.2e}, largest {max(values):.2e})"


def _values(line: Any) -> dict[str, Any]:
    return {field.name: getattr(line, field.name) for field in fields(line)}


@torch.inference_mode()
def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, required=True, help="HotpotQA rows")
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1900, help="longest context")
    parser.add_argument("--candidates", type=int, default=3, help="rows for the table of errors")
    parser.add_argument("--rounds", type=int, default=9, help="of restoring")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()

    bench = FormatsBench(options.model)
    loaded = load_rows(options.data, "hotpotqa", limit=options.rows)
    contexts = [bench.context(row, options.tokens) for row in loaded.rows]
    lengths = [len(context.token_ids) for context in contexts]
    print(f"{options.model}, {len(contexts)} contexts of {min(lengths)} to {max(lengths)} tokens")

    some = contexts[: options.candidates]
    tables = {"keys": KEYS, "values": VALUES}
    candidates: dict[str, list[CandidateFigures]] = {}
    for kind, table in tables.items() if some else ():
        print(f"\n{kind} alone, {len(some)} contexts: bits of an element, error, median KL")
        candidates[kind] = [bench.candidate(kind, candidate, some) for candidate in table]
        for line in candidates[kind]:
            print(f"  {line.name:58s} {line.bits:6.3f}  {line.error:8.5f}  {median(line.kl):.1e}")

    print("\nbytes to those of 16 bits, KL median: all rows stored")
    uniform = [format for format in PayloadFormat if format is not PayloadFormat.NATIVE]
    mixes = [bench.mix(f"all {format.value}", contexts, _all_in(format)) for format in uniform]
    mixes.append(bench.mix("default", contexts, bench.default_mix))
    for mix in mixes:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in sorted(mix.shares.items()))
        print(f"  {mix.name:10s} {mix.payload_ratio:6.1%}  {_kl(mix.kl)}  {shares}")

    times = bench.restore_ms(mixes[-1].shares, options.rounds)
    print(f"\nrestore of {RESTORED_ROWS} rows, ms, {torch.get_num_threads()} threads")
    for name, each in times.items():
        ratio = median(each) / median(times["f16"])
        print(f"  {name:6s} {median(each):6.1f} [{min(each):.1f}, {max(each):.1f}]  {ratio:.2f}")
    if options.json:
        document = {
            "model": options.model,
            "tokens": lengths,
            "candidates": {
                kind: [_values(line) for line in lines] for kind, lines in candidates.items()
            },
            "mixes": [_values(mix) for mix in mixes],
            "restore_ms": times,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
