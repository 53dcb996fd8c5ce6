"""The model, as the engine sees it: a cache written by row, and calls that compute some rows.

A packed set of rows (`RowSet`) runs through the unchanged model: explicit `position_ids`, a cache
whose `update` scatters fresh keys and values into their rows and returns the whole layer, and the
attention function of `row_attention`. These two modules hold all contact with the internals of
Transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from patchkv_agents.engine.capture import AttentionCapture
from patchkv_agents.engine.row_attention import (
    ATTENTION_NAME,
    ActiveRows,
    AttentionRecord,
    activated,
    active_rows,
)
from patchkv_agents.engine.verdict import layer_types
from patchkv_agents.errors import UnsupportedModelError
from patchkv_agents.ranges import RowSet

NO_LIMIT = 1 << 30
"""Longest context of a model that names none."""

MAX_ROWS = 512
"""Rows per forward call: long enough for full GEMM speed, short enough to stay in the CPU cache."""


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
        active = active_rows()
        if active is None:
            raise RuntimeError("a RowCache is written only through `forward_rows`")
        if active.ready is not None:
            active.ready(self._index)
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


def _cache_argument(model: PreTrainedModel) -> str:
    """Transformers 5.24 renamed the argument."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


@torch.inference_mode()
def plain_call(
    model: PreTrainedModel, token_ids: np.ndarray[Any, np.dtype[np.int64]], *, shift: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A full prefill by the model alone, without a `RowCache`.

    Args:
        model: the model, with any attention implementation.
        token_ids: int64 `[tokens]`.
        shift: position of the first token.

    Returns:
        Logits of the last token, `[vocab]`; keys and values, `[layers, kv_heads, tokens,
        head_dim]`.

    Raises:
        UnsupportedModelError: the model keeps other state than keys and values of one shape.
    """
    cache = DynamicCache()  # without the configuration: no layer drops rows
    position_ids = torch.arange(shift, shift + len(token_ids), device=model.device)[None]
    output = model(
        input_ids=torch.from_numpy(token_ids)[None].to(model.device),
        position_ids=position_ids,
        use_cache=True,
        **{_cache_argument(model): cache},
    )
    layers: list[Any] = cache.layers
    shapes = {
        getattr(rows, "shape", None)
        for layer in layers
        for rows in (getattr(layer, "keys", None), getattr(layer, "values", None))
    }
    if len(shapes) != 1 or None in shapes:
        raise UnsupportedModelError(
            "it keeps other state than one key and one value of equal size per token and layer"
        )
    device = model.device
    keys = torch.stack([layer.keys[0].to(device) for layer in layers])
    values = torch.stack([layer.values[0].to(device) for layer in layers])
    return output.logits[0, -1], keys, values


def _scored_layers(config: Any) -> tuple[int, ...]:
    """Layers whose attention can be scored: those that see the whole context, uncapped."""
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return ()
    types = enumerate(layer_types(config))
    return tuple(layer for layer, kind in types if kind == "full_attention")


class ModelAdapter:
    """One model, as the engine sees it: rows in, keys and values into a cache, logits out.

    Args:
        model: its attention implementation is set to `patchkv`.

    Attributes:
        model: the model.
        layers, kv_heads, head_dim: its sizes.
        max_tokens: its longest context.
        scored_layers: layers whose attention an `AttentionCapture` can collect.

    Raises:
        UnsupportedModelError: the model does not use Transformers' attention functions.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        config = model.config.get_text_config()
        self.layers: int = config.num_hidden_layers
        self.kv_heads: int = getattr(config, "num_key_value_heads", config.num_attention_heads)
        self.head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.max_tokens: int = getattr(config, "max_position_embeddings", NO_LIMIT)
        self.scored_layers = _scored_layers(config)
        model.set_attn_implementation(ATTENTION_NAME)
        if model.config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModelError("its attention function cannot be replaced")
        self._cache_argument = _cache_argument(model)

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
        ready: Callable[[int], None] | None = None,
        record: AttentionRecord | None = None,
    ) -> torch.Tensor:
        """Compute `rows` of a context in ascending order, writing their keys and values.

        Args:
            token_ids: ids of the whole context, int64 `[tokens]`; row p is token p.
            rows: positions to compute, at least one. Every position below the last of them must
                be in the cache already or in `rows`.
            cache: changed in place; must have room for the last row.
            capture: collects attention mass, if given.
            ready: called with the index of each layer before anything of that layer is read from
                the cache, once for each chunk of rows.
            record: changed in place, if given.

        Returns:
            Logits of the last row, `[vocab]`.
        """
        logits: torch.Tensor | None = None
        for chunk in rows.chunks(MAX_ROWS):
            positions = chunk.positions()
            ids = torch.from_numpy(token_ids[positions])[None].to(self.device)
            position_ids = torch.from_numpy(positions)[None].to(self.device)
            with activated(ActiveRows(chunk, capture, ready, record)):
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
