"""Measures a whole resume on the GPU of this machine: PatchKV against prefix cache.

    python -m patchkv_evals.device_resume [--json FILE] [--tokens N]
    python -m patchkv_evals.device_resume --cpu      (a tiny model, without a GPU)

The model has Qwen3-8B's shape and random weights. Needs torch, triton, transformers and numpy.
Exit status: 0 all is right, 1 something is not, 2 there is no GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from patchkv_agents.backends.transformers.adapter import ModelAdapter
from patchkv_agents.backends.transformers.support import rope_of
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.recovery import RecoveryPolicy, RecoverySetup
from patchkv_kernels.device_figures import Figure, run_check

PREFIX_CACHE = RecoveryPolicy.named("prefix_cache")

ROUNDS = 3
MAX_ERROR = 0.05
"""Relative error allowed between the logits of prefix cache and of a full prefill, in 16 bits."""
REPLACED = (64, 70)
"""Tokens that the edit takes out and puts in, at one fifth of the context."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Qwen3 model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    dtype: torch.dtype


QWEN3_8B = ModelShape(36, 4096, 32, 8, 128, 12288, 151936, torch.bfloat16)
TINY = ModelShape(4, 64, 4, 2, 16, 128, 512, torch.float32)


def random_model(shape: ModelShape, device: torch.device) -> Any:
    """A Qwen3 model of this shape whose weights are made on the device."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=shape.dtype).eval()


def measure_resume(device: torch.device, tokens: int) -> Iterator[Figure]:
    """Time to the first token after an edit, all methods interleaved from equal stored state."""
    shape = QWEN3_8B if device.type == "cuda" else TINY
    model = random_model(shape, device)
    adapter, rope = ModelAdapter(model), rope_of(model)
    random = np.random.default_rng(0)
    old = random.integers(0, shape.vocabulary, tokens)
    cut, (taken, put) = tokens // 5, REPLACED
    new = np.concatenate([old[:cut], random.integers(0, shape.vocabulary, put), old[cut + taken :]])
    default = RecoveryPolicy.default()
    setups = {
        "prefix cache": RecoverySetup(PREFIX_CACHE),
        "PatchKV, lossless": RecoverySetup(default),
        "PatchKV, mixed precision": RecoverySetup(default, PrecisionPolicy()),
    }
    policies = {name: setup.policy for name, setup in setups.items()}
    stored: dict[str, KVSequence] = {}
    for name, setup in setups.items():
        stored[name] = KVSequence(adapter, rope, storage=setup.storage)
        stored[name].resume(old, setup.policy)
        started = time.perf_counter()
        stored[name].suspend("now")
        size = stored[name].checkpoint.payload_bytes  # waits for what goes on in the background
        ms = (time.perf_counter() - started) * 1e3
        note = f"{size / tokens / 1e3:,.1f} kB a token"
        yield Figure("resume", f"suspend, {name}", ms, "ms", note=note)
    full = KVSequence(adapter, rope).resume(new, PREFIX_CACHE).logits.float()
    times: dict[str, list[float]] = {name: [] for name in policies}
    notes: dict[str, str] = {}
    for round_ in range(ROUNDS + 1):  # the first compiles kernels and does not count
        for name, policy in policies.items():
            ms, logits, note = _resume(stored[name].fork(), new, policy)
            if round_:
                times[name].append(ms)
            notes[name] = note
            if round_ == 0 and policy is PREFIX_CACHE:
                error = float((logits.float() - full).norm() / full.norm())
                yield Figure(
                    "resume", "logits of prefix cache", error, "relative", error <= MAX_ERROR
                )
    baseline = median(times["prefix cache"])
    for name, values in times.items():
        note = f"{min(values):,.1f} to {max(values):,.1f}; {notes[name]}"
        yield Figure("resume", f"first token, {name}", median(values), "ms", note=note)
        if policies[name] is not PREFIX_CACHE:
            factor = baseline / median(values)
            yield Figure("resume", f"faster than prefix cache: {name}", factor, "times")


def _resume(
    sequence: KVSequence, tokens: np.ndarray[Any, np.dtype[np.int64]], policy: RecoveryPolicy
) -> tuple[float, torch.Tensor, str]:
    """Milliseconds from the end of planning to the first token, the logits, and what was done."""
    from patchkv_agents.engine.stopwatch import Stopwatch

    started = time.perf_counter()
    watch = Stopwatch()
    resumed = sequence.resume(tokens, policy, watch=watch)
    int(resumed.logits.argmax())  # waits for the device
    planning_ms = watch.ms("planning")
    ms = (time.perf_counter() - started) * 1e3 - planning_ms
    rows = f"{len(resumed.plan.rows)} rows computed, planning {planning_ms:.1f} ms"
    return ms, resumed.logits, rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the measurement; returns the exit status."""
    return run_check(arguments, "Measure a whole resume on this machine's GPU.", measure_resume)


if __name__ == "__main__":
    sys.exit(main())
