"""Times of saving and loading a checkpoint, by store and by format.

Rows are random and have the shape of a model's (stores look at no values). Every save is of a
version that the store does not have, every load by a handle that has none of its payload; formats
run interleaved. Files are read from the page cache, as they are when a thread comes back soon, and
written without waiting for the disk. The memory store is not here: it hands out references.

A point is one format in one store: `store`, `mix` (`mixed` as the default policy stores),
`tokens`, `payload_bytes`, `save_ms`, `first_layer_ms` (from the start of a streaming load until
its first layer is in place), `load_ms`, each with `*_rounds_ms`, `save_gb_per_s`, `load_gb_per_s`.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

from patchkv_agents.checkpoint import Checkpoint, CheckpointKey
from patchkv_agents.checkpoint.stores import CheckpointStore, open_store
from patchkv_agents.errors import CheckpointError
from patchkv_agents.provenance import without_passwords
from patchkv_evals.benchmarks.results import BenchResult, Column, number, spread
from patchkv_evals.benchmarks.synthetic import MIXES, RowShape, checkpoint_of
from patchkv_evals.benchmarks.timing import Point, Report, interleaved, silent, timing

STORED = ("native", "f16", "mixed")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """What is stored, and where.

    Attributes:
        tokens: of the checkpoint.
        folder: where to put a temporary folder; the system's place if left out.
        redis: address of a server; one of its own is started, if there is one, if left out.
        shape: of the rows.
        rounds: that count.
    """

    tokens: int = 4000
    folder: str | None = None
    redis: str | None = None
    shape: RowShape = RowShape()
    rounds: int = 5


def store(config: StoreConfig, report: Report = silent) -> BenchResult:
    """Save and load each mix in each store, interleaved.

    Raises:
        CheckpointError: a store cannot be written or read.
    """
    with tempfile.TemporaryDirectory(dir=config.folder) as folder, own_redis(config) as redis:
        locations = {"folder": folder, **({"redis": redis} if redis else {})}
        stores = ", ".join(locations)
        report(f"{stores}: {config.rounds} rounds of {len(STORED)} formats")
        points = measure(locations, config)
    redis_given = None if config.redis is None else without_passwords(config.redis)
    return BenchResult("store", {**asdict(config), "redis": redis_given}, points)


def measure(locations: Mapping[str, str], config: StoreConfig) -> list[Point]:
    """The points of some stores (name to address)."""
    checkpoints = {name: checkpoint_of(MIXES[name], config.tokens, config.shape) for name in STORED}
    times = interleaved(
        {
            (name, mix): partial(_once, location, mix, checkpoint)
            for name, location in locations.items()
            for mix, checkpoint in checkpoints.items()
        },
        config.rounds,
    )
    points = []
    for (name, mix), rounds in times.items():
        saved, first_layer, loaded = zip(*rounds, strict=True)
        payload_bytes = checkpoints[mix].payload_bytes
        save, load = timing("save", saved), timing("load", loaded)
        points.append(
            {
                "store": name,
                "mix": mix,
                "tokens": config.tokens,
                "payload_bytes": payload_bytes,
                **save,
                **timing("first_layer", first_layer),
                **load,
                "save_gb_per_s": payload_bytes / save["save_ms"] / 1e6,
                "load_gb_per_s": payload_bytes / load["load_ms"] / 1e6,
            }
        )
    return points


def _once(location: str, mix: str, checkpoint: Checkpoint) -> tuple[float, float, float]:
    """Milliseconds of one save, of a load's first layer and of the whole load."""
    key = CheckpointKey("bench", "bench", "store", "", mix)
    writer = open_store(location)
    started = time.perf_counter()
    writer.save(key, checkpoint)
    saved = time.perf_counter()
    reader = open_store(location)
    first_layer, whole = _timed_load(reader, key)
    reader.delete_thread(key.tenant, key.thread)
    for opened in (reader, writer):
        opened.close()
    return (saved - started) * 1e3, first_layer, whole


def _timed_load(opened: CheckpointStore, key: CheckpointKey) -> tuple[float, float]:
    started = time.perf_counter()
    loading = opened.open(key)
    if loading is None:
        raise CheckpointError("the store lost the checkpoint that was saved last: look at its log")
    loading.wait(1)
    first_layer = time.perf_counter()
    loading.wait()
    return (first_layer - started) * 1e3, (time.perf_counter() - started) * 1e3


@contextmanager
def own_redis(config: StoreConfig) -> Iterator[str | None]:
    """Address of a Redis server: the given one, else one that ends with the block, else None."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if config.redis is not None or binary is None:
        yield config.redis
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


COLUMNS = (
    Column("store", number("store", "")),
    Column("format", number("mix", "")),
    Column("MB", lambda point: f"{point['payload_bytes'] / 1e6:,.1f}"),
    Column("save ms", spread("save")),
    Column("first layer ms", spread("first_layer")),
    Column("load ms", spread("load")),
    Column("load GB/s", number("load_gb_per_s", ".2f")),
)
