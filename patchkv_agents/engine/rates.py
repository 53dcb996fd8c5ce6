"""The rates of this machine with a model, measured, for the cost model of `recovery.costs`."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch

from patchkv_agents.engine.engine import Engine
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.errors import InputError
from patchkv_agents.recovery.costs import DeviceCost, ModelCost
from patchkv_agents.recovery.policy import RecoveryPolicy

_TOKENS = 1024
_LEAST_TOKENS = 128
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
    tokens = min(_TOKENS, engine.max_tokens - 2 * _ROUNDS - 2)
    if tokens < _LEAST_TOKENS:
        raise InputError(f"a context of {engine.max_tokens} tokens is too short to measure rates")
    size = torch.empty(0, dtype=adapter.model.dtype).element_size()
    sizes = ModelCost.of_config(name, adapter.model.config, bytes_per_value=size)
    rng = np.random.default_rng(0)
    token_ids = rng.integers(sizes.vocabulary, size=tokens + 1)
    policy = RecoveryPolicy.default()
    prefills, decodes, fetches = [], [], []
    for _ in range(_ROUNDS + 1):  # the first one warms up
        with adapter.turns:
            sequence = KVSequence(adapter, engine.rope)
            prefills.append(sequence.resume(token_ids[:-1], policy).recovery_ms / 1e3)
            started = time.perf_counter()
            float(sequence.append(int(token_ids[-1]))[0])  # waits for a GPU
            decodes.append(time.perf_counter() - started)
            sequence.suspend()
            resumed = sequence.resume(token_ids, policy)
            fetches.append(resumed.payload_bytes / max(resumed.restore_ms / 1e3, 1e-6))
    decode_s = median(decodes[1:])
    head = sizes.hidden * sizes.vocabulary
    weights = (sizes.linear_parameters + head) * size  # one row: active experts only
    return sizes, DeviceCost(
        "this machine",
        flops_per_s=sizes.flops(tokens, tokens / 2) / median(prefills[1:]),
        memory_bytes_per_s=weights / decode_s,
        transfer_bytes_per_s=median(fetches[1:]),
        overlap=adapter.device.type != "cpu",
    )
