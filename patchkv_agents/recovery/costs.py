"""What a resume costs: a model of time to first token, from sizes and rates.

    compute = max(FLOPs / rate, weights read once for each chunk of rows / memory bandwidth)
    FLOPs   = 2 * linear parameters * rows + 4 * layers * heads * head_dim * rows * keys seen
    fetch   = payload bytes / transfer rate + bytes of 16-bit rows written / memory bandwidth
    TTFT    = overhead + compute + fetch, or max(compute, fetch) where they overlap layer by layer

The FLOPs are the usual count of a forward pass (Kaplan et al., arXiv 2001.08361, table 1). Rates
are what a machine sustains, not its data sheet. Torch is not needed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from patchkv_agents.errors import InputError
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.setup import RecoverySetup

MIXED_PAYLOAD_RATIO = 0.417
"""Bytes of mixed precision to 16 bits, as measured for the default policy (evals/RESULTS.md)."""
_CHUNK_ROWS = 512
"""Rows per forward call of the engine: the weights are read once for each."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The sizes of a model that decide what its rows cost.

    Attributes:
        name: of the model.
        layers, heads, kv_heads, head_dim, vocabulary, hidden: its sizes.
        linear_parameters: of all layers' matrices that one token passes through.
        stored_parameters: the same with the experts that it does not pass through.
        bytes_per_value: of weights, keys and values: 2 for 16 bits.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    linear_parameters: int
    stored_parameters: int
    bytes_per_value: int = 2

    @classmethod
    def of_config(cls, name: str, config: Any, *, bytes_per_value: int = 2) -> ModelCost:
        """The sizes that a Transformers configuration of a decoder with gated MLPs names.

        Where there are experts, every layer is taken to have them.
        """
        config = config.get_text_config()
        heads, hidden = config.num_attention_heads, config.hidden_size
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        width = stored_width = config.intermediate_size
        if getattr(config, "num_experts_per_tok", None):
            expert = getattr(config, "moe_intermediate_size", None) or width
            shared = getattr(config, "n_shared_experts", None) or 0
            counts = ("num_experts", "num_local_experts", "n_routed_experts")
            experts = max(getattr(config, name, None) or 0 for name in counts)
            width = expert * (config.num_experts_per_tok + shared)
            stored_width = expert * (experts + shared)
        return cls.of_sizes(
            name,
            layers=config.num_hidden_layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            width=width,
            vocabulary=config.vocab_size,
            stored_width=stored_width,
            bytes_per_value=bytes_per_value,
        )

    @classmethod
    def of_sizes(
        cls,
        name: str,
        *,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        width: int,
        vocabulary: int,
        stored_width: int | None = None,
        bytes_per_value: int = 2,
    ) -> ModelCost:
        """A decoder whose layers have four attention matrices and a gated MLP of three.

        Args:
            width: of the MLP, or of all experts together that a token passes through.
            stored_width: of all experts together; `width` where there are none.
            name, layers, hidden, heads, kv_heads, head_dim, vocabulary, bytes_per_value: see the
                attributes.
        """
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        stored_width = width if stored_width is None else stored_width
        return cls(
            name=name,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=hidden,
            vocabulary=vocabulary,
            linear_parameters=layers * (attention + 3 * hidden * width),
            stored_parameters=layers * (attention + 3 * hidden * stored_width),
            bytes_per_value=bytes_per_value,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers, unquantised."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value

    def flops(self, rows: float, keys_seen: float) -> float:
        """Floating-point operations of `rows` that see `keys_seen` keys each, on average."""
        attention = 4 * self.layers * self.heads * self.head_dim * keys_seen
        return rows * (2 * self.linear_parameters + attention)


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """The rates of a machine.

    Attributes:
        name: of the machine.
        flops_per_s: what a forward pass of many rows sustains.
        memory_bytes_per_s: of the memory that holds weights and cache.
        transfer_bytes_per_s: at which payload reaches the cache, dequantising included.
        overhead_s: what every resume takes beside (launching kernels, one call's fixed cost).
        overlap: whether a layer's rows are fetched while the layers before it compute.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    transfer_bytes_per_s: float
    overhead_s: float = 0.0
    overlap: bool = True

    def __post_init__(self) -> None:
        rates = self.flops_per_s, self.memory_bytes_per_s, self.transfer_bytes_per_s
        if not min(rates) > 0 or not self.overhead_s >= 0:
            raise InputError(f"the rates of '{self.name}' must be greater than 0")

    def compute_s(self, model: ModelCost, rows: float, keys_seen: float) -> float:
        """Seconds to run rows through all layers, and the last one through the head."""
        if rows <= 0:
            return 0.0
        chunks = math.ceil(rows / _CHUNK_ROWS)
        head = model.hidden * model.vocabulary
        # Each row of a chunk may pass through other experts.
        passed = min(model.stored_parameters, rows / chunks * model.linear_parameters)
        read = (chunks * max(passed, model.linear_parameters) + head) * model.bytes_per_value
        flops = model.flops(rows, keys_seen) + 2 * head
        return max(flops / self.flops_per_s, read / self.memory_bytes_per_s)

    def fetch_s(self, model: ModelCost, rows: float, payload_ratio: float) -> float:
        """Seconds to bring rows from where they are stored into the cache."""
        written = rows * model.kv_bytes
        return written * payload_ratio / self.transfer_bytes_per_s + (
            written / self.memory_bytes_per_s
        )


@dataclass(frozen=True, slots=True)
class EditedContext:
    """One edit in a context.

    Attributes:
        tokens: of the new version.
        prefix: tokens before the edit.
        new: tokens of the edit.
    """

    tokens: int
    prefix: int
    new: int

    def __post_init__(self) -> None:
        if not 0 <= self.prefix <= self.prefix + self.new <= self.tokens or self.tokens < 1:
            raise InputError(
                f"{self.prefix} tokens before the edit and {self.new} new ones do not fit into "
                f"{self.tokens} tokens"
            )

    @property
    def suffix(self) -> int:
        """Tokens behind the edit."""
        return self.tokens - self.prefix - self.new


@dataclass(frozen=True, slots=True)
class MethodCost:
    """What a method computes and fetches.

    Attributes:
        name: of the method.
        rows: rows that run, averaged over the layers, new ones included.
        restored: rows that are fetched from storage, the prefix included.
        payload_ratio: bytes of a stored row to those in the cache.
    """

    name: str
    rows: float
    restored: float
    payload_ratio: float

    @classmethod
    def of_setup(cls, setup: RecoverySetup, context: EditedContext, model: ModelCost) -> MethodCost:
        """What a method would do on one edited context, without knowing its text.

        A window model is asked about an edit that removes as many tokens as it brings.

        Args:
            setup: of the method.
            context: the edit.
            model: of whose layers CacheBlend runs the first in full.
        """
        ratio = 1.0
        if not setup.storage.is_lossless:
            ratio = MIXED_PAYLOAD_RATIO * 2 / model.bytes_per_value
        rows = setup.policy.method.expected_rows(
            new=context.new, suffix=context.suffix, layers=model.layers
        )
        return cls(setup.name, max(1.0, rows), max(0.0, context.tokens - rows), ratio)


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Predicted times of one resume, in milliseconds."""

    method: str
    rows: float
    compute_ms: float
    fetch_ms: float
    resume_ttft_ms: float


def estimate(
    model: ModelCost, device: DeviceCost, context: EditedContext, method: MethodCost
) -> CostEstimate:
    """Predict the resume TTFT of a method; see the module's text for the formula."""
    keys_seen = (context.prefix + context.tokens) / 2  # rows lie evenly behind the prefix
    compute = device.compute_s(model, method.rows, keys_seen)
    fetch = device.fetch_s(model, method.restored, method.payload_ratio)
    if device.overlap:
        first_layer = min(fetch, compute) / model.layers  # before anything can overlap
        both = max(fetch, compute) + first_layer
    else:
        both = fetch + compute
    return CostEstimate(
        method.name,
        method.rows,
        compute * 1e3,
        fetch * 1e3,
        (device.overhead_s + both) * 1e3,
    )


def speedup(
    model: ModelCost, device: DeviceCost, context: EditedContext, setup: RecoverySetup
) -> float:
    """How many times faster a method resumes than the exact prefix alone."""
    exact = MethodCost.of_setup(RecoverySetup(RecoveryPolicy.exact()), context, model)
    method = MethodCost.of_setup(setup, context, model)
    return (
        estimate(model, device, context, exact).resume_ttft_ms
        / estimate(model, device, context, method).resume_ttft_ms
    )


def least_suffix(
    model: ModelCost,
    device: DeviceCost,
    context: EditedContext,
    setup: RecoverySetup,
    *,
    factor: float,
) -> int | None:
    """The suffix from which on a method is `factor` times faster than exact reuse.

    Prefix and edit stay as they are in `context`; None where a million tokens do not suffice. Found
    by bisection: where the speedup crosses `factor` more than once, as it may by a few per cent
    where rows fill another forward call, it is one of the crossings.
    """

    def pays(suffix: int) -> bool:
        changed = replace(context, tokens=context.prefix + context.new + suffix)
        return suffix > 0 and speedup(model, device, changed, setup) >= factor

    return _least(pays, 1_000_000)


def largest_edit(
    model: ModelCost,
    device: DeviceCost,
    context: EditedContext,
    setup: RecoverySetup,
    *,
    factor: float,
) -> int | None:
    """The most new tokens with which a method is still `factor` times faster than exact reuse.

    Prefix and suffix stay as they are in `context`; None where no size is small enough.
    """

    def too_many(new: int) -> bool:
        changed = replace(context, new=new, tokens=context.prefix + new + context.suffix)
        return speedup(model, device, changed, setup) < factor

    if too_many(0):
        return None
    least = _least(too_many, 1_000_000)
    return 1_000_000 if least is None else least - 1


def restoring_pays(
    model: ModelCost, device: DeviceCost, *, rows: int, payload_bytes: int, keys_seen: float
) -> bool:
    """Whether to fetch rows takes less time than to compute them.

    A rule for whoever knows the rates of a machine and its store; the engine fetches regardless.

    Args:
        model, device: sizes and rates.
        rows: that a plan would restore behind the exact prefix.
        payload_bytes: in which they are stored.
        keys_seen: by each of them, on average.
    """
    if rows <= 0:
        return True
    ratio = payload_bytes / (rows * model.kv_bytes)
    return device.fetch_s(model, rows, ratio) < device.compute_s(model, rows, keys_seen)


def least_transfer_rate(
    model: ModelCost, device: DeviceCost, context: EditedContext, *, payload_ratio: float
) -> float | None:
    """Bytes per second above which the suffix is fetched faster than computed.

    None where writing the rows alone takes longer than computing them.
    """
    rows = context.suffix
    keys_seen = (context.prefix + context.tokens) / 2
    written = rows * model.kv_bytes
    left_s = device.compute_s(model, rows, keys_seen) - written / device.memory_bytes_per_s
    return written * payload_ratio / left_s if left_s > 0 else None


def _least(holds: Callable[[int], bool], most: int) -> int | None:
    """The least number from 0 to `most` for which a condition holds that stays once it does."""
    if not holds(most):
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
