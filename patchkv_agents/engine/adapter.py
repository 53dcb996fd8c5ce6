"""All contact with the internals of Transformers: the cache, the attention function, the call.

A packed set of rows (`RowSet`) runs through the unchanged model: explicit `position_ids`, a cache
whose `update` scatters fresh keys and values into their rows and returns the whole layer, and a
registered attention function in which a row at position p sees exactly the keys at positions <= p.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from patchkv_agents.engine.capture import AttentionCapture
from patchkv_agents.ranges import RowSet

ATTENTION_NAME = "patchkv"
"""The attention implementation under which the function below is registered."""

MAX_ROWS = 512
"""Rows per forward call: long enough for full GEMM speed, short enough to stay in the CPU cache."""


@dataclass(frozen=True, slots=True)
class _ActiveRows:
    """What the attention function must know of the call under way."""

    rows: RowSet
    capture: AttentionCapture | None


_ACTIVE: ContextVar[_ActiveRows | None] = ContextVar("patchkv_active_rows", default=None)


class _RowLayer(CacheLayerMixin):
    """One layer of a `RowCache`, in the form that Transformers asks for."""

    is_sliding = False

    def __init__(self, owner: RowCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise RuntimeError("a RowCache is allocated before its first use")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter fresh rows `[1, kv_heads, rows, head_dim]`; return all rows that they can see."""
        active = _ACTIVE.get()
        if active is None:
            raise RuntimeError("a RowCache is written only through `forward_rows`")
        keys, values = self._owner.keys[self._index], self._owner.values[self._index]
        for offset, start, stop in active.rows.packed():
            rows = slice(offset, offset + stop - start)
            keys[:, start:stop] = key_states[0, :, rows]
            values[:, start:stop] = value_states[0, :, rows]
        visible = active.rows.stop
        return keys[None, :, :visible], values[None, :, :visible]

    def get_seq_length(self) -> int:
        return self._owner.filled

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.filled + query_length, 0

    def get_max_length(self) -> int:
        return self._owner.capacity


class RowCache(Cache):
    """Keys and values of one thread, all layers in one tensor, written by row.

    Attributes:
        keys, values: `[layers, kv_heads, capacity, head_dim]`; rows never written hold
            garbage.
        filled: one past the last row that was written.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, kv_heads, capacity, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.filled = 0
        super().__init__(layers=[_RowLayer(self, index) for index in range(layers)])

    @property
    def capacity(self) -> int:
        """Rows there is room for."""
        return self.keys.shape[2]

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` rows, and some more where the cache has to grow."""
        if capacity > self.capacity:
            self._reallocate(max(capacity, self.capacity * 5 // 4))

    def resize(self, capacity: int) -> None:
        """Make room for at least `capacity` rows; give memory back if there is far too much."""
        if not capacity <= self.capacity <= 2 * capacity:
            self._reallocate(capacity)

    def _reallocate(self, capacity: int) -> None:
        """Move the rows that were written, as far as they fit, into tensors of `capacity` rows."""
        rows = min(self.filled, capacity)
        shape = (*self.keys.shape[:2], capacity, self.keys.shape[3])
        keys, values = self.keys.new_empty(shape), self.values.new_empty(shape)
        keys[:, :, :rows] = self.keys[:, :, :rows]
        values[:, :, :rows] = self.values[:, :, :rows]
        self.keys, self.values, self.filled = keys, values, rows


def _causal_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scaling: float | None
) -> torch.Tensor:
    """Attention of one run of rows on CPU: the past without a mask, its own triangle causally.

    The two parts are merged by their log-sum-exp. With the query heads of a group folded into
    rows, the past needs no copy of its keys, and no mask is ever made. Shapes as for `_causal`.
    """
    _, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own_key = repeat_kv(key[:, :, start:], heads // kv_heads)
    own_value = repeat_kv(value[:, :, start:], heads // kv_heads)
    own, own_lse = flash(query, own_key, own_value, 0.0, True, scale=scaling)
    if start == 0:
        return cast("torch.Tensor", own)
    folded = query.reshape(1, kv_heads, -1, head_dim)
    past, past_lse = flash(
        folded, key[:, :, :start], value[:, :, :start], 0.0, False, scale=scaling
    )
    weight = torch.sigmoid(own_lse - past_lse.reshape(1, heads, rows)).unsqueeze(-1)
    return torch.lerp(past.reshape_as(own), own, weight.to(own.dtype))


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scaling: float | None
) -> torch.Tensor:
    """Attention of the rows at positions `[start, start + rows)` to keys `[0, start + rows)`.

    Args:
        query: `[1, heads, rows, head_dim]`.
        key, value: `[1, kv_heads, start + rows, head_dim]`.

    Returns:
        `[1, heads, rows, head_dim]`.
    """
    if query.device.type == "cpu":
        return _causal_on_cpu(query, key, value, start, scaling)
    bias = causal_lower_right(query.shape[2], key.shape[2])
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scaling, enable_gqa=gqa
    )


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function: by rows inside `forward_rows`, plain SDPA elsewhere.

    Args:
        module: the model's attention layer.
        query: `[1, heads, rows, head_dim]`, packed rows.
        key, value: `[1, kv_heads, visible, head_dim]`, what `_RowLayer.update` returned.
        attention_mask: None inside `forward_rows`.
        scaling: factor of the scores; None is `head_dim ** -0.5`.
        dropout: used outside `forward_rows` only.
        kwargs: passed on outside `forward_rows`.

    Returns:
        `[1, rows, heads, head_dim]`, and None for the weights.
    """
    active = _ACTIVE.get()
    if active is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    for offset, start, stop in active.rows.packed():
        rows = slice(offset, offset + stop - start)
        run = query[:, :, rows]
        part = _causal(run, key[:, :, :stop], value[:, :, :stop], start, scaling)
        output[:, rows] = part.transpose(1, 2)
        if active.capture is not None:
            layer = int(module.layer_idx)  # type: ignore[arg-type]
            active.capture.observe(layer, start, run[0], key[0, :, :stop], scaling)
    return output, None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask inside `forward_rows`, where the attention function is causal by itself."""
    return None if _ACTIVE.get() is not None else sdpa_mask(*args, **kwargs)


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, _mask)


@contextmanager
def _activated(rows: RowSet, capture: AttentionCapture | None) -> Iterator[None]:
    token = _ACTIVE.set(_ActiveRows(rows, capture))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


class ModelAdapter:
    """One model, as the engine sees it: rows in, keys and values into a cache, logits out."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        config = model.config.get_text_config()
        self.layers: int = config.num_hidden_layers
        self.kv_heads: int = getattr(config, "num_key_value_heads", config.num_attention_heads)
        self.head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.max_tokens: int = config.max_position_embeddings
        model.set_attn_implementation(ATTENTION_NAME)
        parameters = inspect.signature(model.forward).parameters
        # Transformers 5.24 renamed the argument.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def device(self) -> torch.device:
        """Where the model's inputs go."""
        return self.model.device

    def new_cache(self, capacity: int) -> RowCache:
        """An empty cache with room for `capacity` rows."""
        return RowCache(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            capacity=capacity,
            dtype=self.model.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward_rows(
        self,
        token_ids: np.ndarray[Any, np.dtype[np.int64]],
        rows: RowSet,
        cache: RowCache,
        *,
        capture: AttentionCapture | None = None,
    ) -> torch.Tensor:
        """Compute `rows` of a context in ascending order, writing their keys and values.

        Args:
            token_ids: ids of the whole context, int64 `[tokens]`; row p is token p.
            rows: positions to compute, at least one. Every position below the last of them must
                be in the cache already or in `rows`.
            cache: changed in place; must have room for the last row.
            capture: collects attention mass, if given.

        Returns:
            Logits of the last row, `[vocab]`.
        """
        logits: torch.Tensor | None = None
        for chunk in rows.chunks(MAX_ROWS):
            positions = chunk.positions()
            ids = torch.from_numpy(token_ids[positions])[None].to(self.device)
            position_ids = torch.from_numpy(positions)[None].to(self.device)
            with _activated(chunk, capture):
                output = self.model(
                    input_ids=ids,
                    position_ids=position_ids,
                    use_cache=True,
                    logits_to_keep=1,
                    **{self._cache_argument: cache},
                )
            cache.filled = max(cache.filled, chunk.stop)
            logits = output.logits[0, -1]
        if logits is None:
            raise ValueError("no rows to compute")
        return logits
