"""Times of saving and loading a checkpoint, by store and by format.

    python -m patchkv_evals.store_bench [--tokens 4000] [--rounds 5] [--folder DIR] [--redis URL]
                                        [--json FILE]

The rows are random and have the shape of the embedded model's (30 layers, 3 kv heads, head_dim 64;
stores look at no values). Every save is of a version that the store does not have, every load by a
handle that has none of its payload; formats run interleaved, figures are medians with the smallest
and largest in brackets. Files are read from the page cache, as they are when a thread comes back
soon, and written without waiting for the disk. The memory store is not here: it hands out
references. Without `--redis` a `redis-server` of its own is started, if there is one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from patchkv_agents.checkpoint import Checkpoint, CheckpointKey
from patchkv_agents.checkpoint.extents import Extent, extents_of
from patchkv_agents.checkpoint.stores import CheckpointStore, open_store
from patchkv_kernels import Rope, RopeLayout, quantize_gather
from patchkv_kernels.payload import PayloadFormat

LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
BLOCK = 32
MIXES: dict[str, dict[PayloadFormat, float]] = {
    "native (float32)": {PayloadFormat.NATIVE: 1.0},
    "f16": {PayloadFormat.F16: 1.0},
    "mixed": {PayloadFormat.F16: 0.02, PayloadFormat.K8V8: 0.1, PayloadFormat.K8V4: 0.88},
}
"""Share of the blocks in each format; mixed as `formats_bench` finds the default policy's."""


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """One line of the benchmark; times in milliseconds, one for each round.

    Attributes:
        first_layer_ms: from the start of a streaming load until its first layer is in place.
    """

    store: str
    mix: str
    payload_bytes: int
    save_ms: tuple[float, ...]
    first_layer_ms: tuple[float, ...]
    load_ms: tuple[float, ...]

    def gb_per_s(self, times_ms: tuple[float, ...]) -> float:
        """Payload over the median time."""
        return self.payload_bytes / median(times_ms) / 1e6

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        rates = {
            f"{name}_gb_per_s": self.gb_per_s(getattr(self, f"{name}_ms"))
            for name in ("save", "load")
        }
        return {**values, **rates}


def checkpoint_of(mix: Mapping[PayloadFormat, float], tokens: int) -> Checkpoint:
    """A checkpoint of random rows, its blocks in the formats of `mix`."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(LAYERS, KV_HEADS, tokens, HEAD_DIM, generator=generator) for _ in range(2)
    )
    inv_freq = 100_000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    rope = Rope(inv_freq.astype(np.float32), RopeLayout.HALF_SPLIT)
    starts = range(0, tokens, BLOCK)
    rng = np.random.default_rng(0)
    chosen = rng.choice(len(mix), size=len(starts), p=list(mix.values()))
    extents: list[Extent] = []
    for number, format in enumerate(mix):
        ranges = [
            (start, min(start + BLOCK, tokens), start)
            for start, own in zip(starts, chosen, strict=True)
            if own == number
        ]
        payload = quantize_gather(keys, values, ranges, format=format, rope=rope)
        extents += extents_of(payload, [start for start, _, _ in ranges])
    return Checkpoint(
        token_ids=rng.integers(0, 49_152, tokens),
        origins=np.zeros(tokens, np.int16),
        scores=np.full(tokens, 1 / tokens, np.float32),
    ).with_extents(extents)


def measure(locations: Mapping[str, str], tokens: int, rounds: int) -> list[StoreFigures]:
    """Save and load each mix in each store (name to address), interleaved."""
    checkpoints = {name: checkpoint_of(mix, tokens) for name, mix in MIXES.items()}
    times: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for number in range(rounds + 1):
        for store, location in locations.items():
            for mix, checkpoint in checkpoints.items():
                taken = _once(location, mix, checkpoint)
                if number:  # the first round warms up
                    times[store, mix].append(taken)
    return [
        StoreFigures(store, mix, checkpoints[mix].payload_bytes, *zip(*taken, strict=True))
        for (store, mix), taken in times.items()
    ]


def _once(location: str, mix: str, checkpoint: Checkpoint) -> tuple[float, float, float]:
    """Milliseconds of one save, of a load's first layer and of the whole load."""
    key = CheckpointKey("bench", "bench", "store_bench", "", mix)
    writer = open_store(location)
    started = time.perf_counter()
    writer.save(key, checkpoint)
    saved = time.perf_counter()
    reader = open_store(location)
    first_layer, whole = _timed_load(reader, key)
    reader.delete_thread(key.tenant, key.thread)
    for store in (reader, writer):
        store.close()
    return (saved - started) * 1e3, first_layer, whole


def _timed_load(store: CheckpointStore, key: CheckpointKey) -> tuple[float, float]:
    started = time.perf_counter()
    loading = store.open(key)
    if loading is None:
        raise SystemExit("the store lost the checkpoint that was saved last")
    loading.wait(1)
    first_layer = time.perf_counter()
    loading.wait()
    return (first_layer - started) * 1e3, (time.perf_counter() - started) * 1e3


@contextmanager
def _own_redis() -> Iterator[str | None]:
    """Address of a redis-server that ends with the block, or None without the program."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def _spread(values: tuple[float, ...]) -> str:
    return f"{median(values):6.1f} [{min(values):.1f}, {max(values):.1f}]"


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to put a temporary folder")
    parser.add_argument("--redis", help="address of a server, instead of one of its own")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, _own_redis() as own:
        redis = options.redis or own
        locations = {"folder": folder, **({"redis": redis} if redis else {})}
        lines = measure(locations, options.tokens, options.rounds)
    print(
        f"{options.tokens:,} tokens, {options.rounds} rounds, {torch.get_num_threads()} threads\n"
        "store   format               MB     save ms                 first layer ms          "
        "load ms                 load GB/s"
    )
    for line in lines:
        print(
            f"{line.store:7} {line.mix:17} {line.payload_bytes / 1e6:6.1f}  "
            f"{_spread(line.save_ms):24}{_spread(line.first_layer_ms):24}"
            f"{_spread(line.load_ms):24}{line.gb_per_s(line.load_ms):6.2f}"
        )
    if options.json:
        document = {
            "tokens": options.tokens,
            "rounds": options.rounds,
            "mixes": {name: {f.value: s for f, s in mix.items()} for name, mix in MIXES.items()},
            "lines": [line.to_dict() for line in lines],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
