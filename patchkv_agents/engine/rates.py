"""The rates of this machine with a model, measured, for the cost model of `recovery.costs`."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from patchkv_agents.checkpoint import Checkpoint
from patchkv_agents.engine.engine import Engine
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.errors import InputError
from patchkv_agents.ranges import IntArray
from patchkv_agents.recovery.costs import DeviceCost, ModelCost
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.restore import Restoration

_TOKENS = 1024
_MIN_TOKENS = 128
_ROUNDS = 3


def measured_rates(engine: Engine, name: str) -> tuple[ModelCost, DeviceCost]:
    """Measure how fast a model prefills, decodes and restores here; takes some seconds.

    Args:
        engine: runs random tokens in sequences of its own; threads are not touched.
        name: of the model, for what is printed.

    Returns:
        The sizes of the model, and the rates: of a prefill of about a thousand tokens; of memory,
        from one decode step; of restoring rows stored at mixed precision, dequantising included.

    Raises:
        InputError: the model's context is too short to measure.
    """
    adapter = engine.adapter
    tokens = min(_TOKENS, engine.max_tokens - 1)
    if tokens < _MIN_TOKENS:
        raise InputError(f"a context of {engine.max_tokens} tokens is too short to measure rates")
    value_bytes = torch.empty(0, dtype=adapter.model.dtype).element_size()
    sizes = ModelCost.of_config(name, adapter.model.config, bytes_per_value=value_bytes)
    rng = np.random.default_rng(0)
    token_ids = rng.integers(sizes.vocabulary, size=tokens + 1)
    rounds = [_round(engine, token_ids) for _ in range(_ROUNDS + 1)]
    prefill_s, decode_s, transfer = map(median, zip(*rounds[1:], strict=True))  # one warms up
    head = sizes.hidden * sizes.vocabulary
    weight_bytes = (sizes.linear_parameters + head) * value_bytes  # one row: active experts only
    return sizes, DeviceCost(
        "this machine",
        flops_per_s=sizes.flops(tokens, tokens / 2) / prefill_s,
        memory_bytes_per_s=weight_bytes / decode_s,
        transfer_bytes_per_s=transfer,
        overlap=adapter.device.type != "cpu",
    )


def _round(engine: Engine, token_ids: IntArray) -> tuple[float, float, float]:
    """Run all tokens but one, then that one, and store and restore them.

    Returns:
        Seconds of the prefill; seconds of the decode step; bytes restored per second.
    """
    sequence = KVSequence(engine.adapter, engine.rope, storage=engine.storage)
    policy = RecoveryPolicy.default()
    with engine.adapter.lock:
        prefill_s = _seconds(lambda: sequence.resume(token_ids[:-1], policy).logits)
        decode_s = _seconds(lambda: sequence.append(int(token_ids[-1])))
        sequence.suspend("now")
        return prefill_s, decode_s, _restored_bytes_per_s(engine, sequence.checkpoint)


def _seconds(compute: Callable[[], torch.Tensor]) -> float:
    """How long it takes to have the logits `[vocab]`: a GPU may still be at work on them."""
    started = time.perf_counter()
    float(compute()[0])
    return time.perf_counter() - started


def _restored_bytes_per_s(engine: Engine, checkpoint: Checkpoint) -> float:
    """Payload of a stored checkpoint per second in which its rows are written into a cache."""
    adapter = engine.adapter
    cache = adapter.new_cache(len(checkpoint))
    started = time.perf_counter()
    restoration = Restoration(checkpoint.extents, cache.shards, engine.rope)
    for layer in range(adapter.layers):
        restoration.ready(layer)
    for shard in cache.shards:
        float(shard.values[-1, 0, 0, 0])  # waits for a GPU
    return restoration.payload_bytes / (time.perf_counter() - started)
