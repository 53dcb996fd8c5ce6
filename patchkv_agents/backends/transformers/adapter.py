"""The model, as the engine sees it: a cache written by row, and calls that compute some rows.

A packed set of rows (`RowSet`) runs through the unchanged model: explicit `position_ids`, a cache
whose `update` scatters fresh keys and values into their rows and returns the whole layer, and the
attention function of `row_attention`. These two modules and `layerwise` hold all contact with
the internals of Transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from patchkv_agents.backends.model_lock import model_lock
from patchkv_agents.backends.transformers.capture import AttentionCapture
from patchkv_agents.backends.transformers.row_attention import (
    ATTENTION_NAME,
    ActiveRows,
    AttentionRecord,
    LayerReached,
    activated,
    active_rows,
)
from patchkv_agents.backends.transformers.verdict import layer_types, rope_parameters
from patchkv_agents.checkpoint.shards import CacheShard
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
        latent_first = self._owner.placements[self._index].latent_first
        if latent_first:
            key_states, value_states = value_states, key_states
        if active.ready is not None:
            active.ready(self._index)
        if active.fresh is not None:
            active.fresh(self._index, key_states, value_states)
        keys, values = self._owner.layer(self._index)
        for offset, start, stop in active.rows.packed():
            rows = slice(offset, offset + stop - start)
            keys[:, start:stop] = key_states[0, :, rows]
            values[:, start:stop] = value_states[0, :, rows]
        if active.last_layer == self._index:
            raise LayerReached
        visible = active.standing.stop
        seen = keys[None, :, :visible], values[None, :, :visible]
        return seen[::-1] if latent_first else seen

    def get_seq_length(self) -> int:
        return self._owner.filled

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.filled + query_length, 0

    def get_max_length(self) -> int:
        return self._owner.capacity


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Where a layer's keys and values are made and kept, and their shape.

    Attributes:
        device, dtype: of both.
        kv_heads, key_width, value_width: sizes of one token's rows.
        latent_first: the model hands its cache a latent in the place of keys and the rotated part
            of the keys in the place of values (latent attention, MLA, arXiv 2405.04434, 2.1). The
            part that rotates is kept as keys here.
    """

    device: torch.device
    dtype: torch.dtype
    kv_heads: int
    key_width: int
    value_width: int
    latent_first: bool


class RowCache(Cache):
    """Keys and values of one thread, written by row; neighbours of one kind in one tensor.

    Attributes:
        placements: of the layers that have rows of their own.
        shards: all layers in order. Rows never written hold garbage.
        filled: one past the last row that was written.
    """

    def __init__(
        self,
        placements: Sequence[LayerPlacement],
        *,
        capacity: int,
    ) -> None:
        self.placements = tuple(placements)
        shards: list[CacheShard] = []
        for place, group in groupby(placements):
            first = shards[-1].layers.stop if shards else 0
            shape = (len(list(group)), place.kv_heads, capacity)
            keys, values = (
                torch.empty(*shape, width, dtype=place.dtype, device=place.device)
                for width in (place.key_width, place.value_width)
            )
            shards.append(CacheShard(first, keys, values))
        self.shards = tuple(shards)
        self.filled = 0
        super().__init__(layers=[_RowLayer(self, index) for index in range(len(placements))])

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, `[kv_heads, capacity, head_dim]`, to read and to write."""
        shard = next(shard for shard in self.shards if index in shard.layers)
        return shard.keys[index - shard.first], shard.values[index - shard.first]

    @property
    def capacity(self) -> int:
        """Rows there is room for."""
        return self.shards[0].keys.shape[2]

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

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            larger = tensor.new_empty(*tensor.shape[:2], capacity, tensor.shape[3])
            larger[:, :, :rows] = tensor[:, :, :rows]
            return larger

        self.shards = tuple(
            CacheShard(shard.first, moved(shard.keys), moved(shard.values)) for shard in self.shards
        )
        self.filled = rows


def _cache_argument(model: PreTrainedModel) -> str:
    """Transformers 5.24 renamed the argument."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model's inputs go, and its logits come from."""
    device = model.device
    if device.type != "meta":
        return device
    # Accelerate keeps the embedding elsewhere until it runs; its outermost hook knows where that
    # is, and brings the logits there.
    hook: Any = model._hf_hook
    return torch.device(hook.execution_device)


@torch.inference_mode()
def plain_call(
    model: PreTrainedModel, token_ids: np.ndarray[Any, np.dtype[np.int64]], *, shift: int = 0
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A full prefill by the model alone, without a `RowCache`.

    Args:
        model: the model, with any attention implementation.
        token_ids: int64 `[tokens]`.
        shift: position of the first token.

    Returns:
        Logits of the last token, `[vocab]`; keys and values of each layer that has rows of its
        own, `[kv_heads, tokens, width]`, where the layer makes them. Of a layer with latents: the
        rotated part of the keys, and the latents.

    Raises:
        UnsupportedModelError: the model keeps other state than one key and one value per token.
    """
    cache = DynamicCache()  # without the configuration: no layer drops rows
    device = input_device(model)
    position_ids = torch.arange(shift, shift + len(token_ids), device=device)[None]
    output = model(
        input_ids=torch.from_numpy(token_ids)[None].to(device),
        position_ids=position_ids,
        use_cache=True,
        **{_cache_argument(model): cache},
    )
    layers: list[Any] = cache.layers
    rows = [_rows_of(layer, len(token_ids)) for layer in layers]
    if any(_is_latent_first(model, *pair) for pair in rows):
        rows = [(values, keys) for keys, values in rows]
    return output.logits[0, -1], rows


def _rows_of(layer: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[kv_heads, tokens, width]` of a layer of Transformers' cache."""
    state = {name: each for name, each in vars(layer).items() if isinstance(each, torch.Tensor)}
    keys, values = state.pop("keys", None), state.pop("values", None)
    further = any(tensor.ndim > 2 for tensor in state.values())
    if keys is None or values is None or keys.shape[:3] != values.shape[:3] or further:
        raise UnsupportedModelError(
            "it keeps other state than one key and one value per token and layer"
        )
    if keys.ndim != 4 or keys.shape[2] != tokens:
        raise UnsupportedModelError("it keeps keys of some tokens only")
    return keys[0], values[0]


def _is_latent_first(model: PreTrainedModel, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a layer's keys are latents, and its values the part of the keys that is rotated."""
    text = model.config.get_text_config(decoder=True)
    latent = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    return len(keys) == 1 and (keys.shape[2], values.shape[2]) == latent


def _longest_context(text: Any) -> int:
    """Tokens for which a model's positions were made; YaRN's factor extends them."""
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int):
        return NO_LIMIT
    for parameters in rope_parameters(text):
        if parameters.get("rope_type") == "yarn":
            original = parameters.get("original_max_position_embeddings") or longest
            longest = max(longest, int(original * float(parameters.get("factor") or 1.0)))
    return longest


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
        layers: those that have rows of their own; others use the rows of one of these.
        kv_heads, head_dim: sizes of the first layer's keys.
        is_even: whether all layers have keys and values of one size.
        max_tokens: its longest context.
        scored_layers: layers whose attention an `AttentionCapture` can collect.
        placements: of each layer's keys and values, as found by running one token: layers may lie
            on several devices, or be quantised.
        lock: the model's, held during each call of it, so that Python threads and several engines
            can share it. A long prefill lets others in after each chunk of `MAX_ROWS` rows.

    Raises:
        UnsupportedModelError: the model does not use Transformers' attention functions.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        config = model.config.get_text_config(decoder=True)
        self.max_tokens: int = _longest_context(config)
        self.scored_layers = _scored_layers(config)
        model.set_attn_implementation(ATTENTION_NAME)
        if model.config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModelError("its attention function cannot be replaced")
        self._cache_argument = _cache_argument(model)
        self.lock = model_lock(model)
        with self.lock:
            _, rows = plain_call(model, np.zeros(1, dtype=np.int64))
        # What a model hands its cache is not always named so that its keys come first.
        latent = any(_is_latent_first(model, values, keys) for keys, values in rows)
        self.placements = tuple(
            LayerPlacement(
                keys.device, keys.dtype, len(keys), keys.shape[2], values.shape[2], latent
            )
            for keys, values in rows
        )
        self.layers = len(self.placements)
        self.kv_heads, self.head_dim = (
            self.placements[0].kv_heads,
            self.placements[0].key_width,
        )
        sizes = {(each.kv_heads, each.key_width, each.value_width) for each in self.placements}
        self.is_even = len(sizes) == 1 and self.head_dim == self.placements[0].value_width

    @property
    def device(self) -> torch.device:
        """Where the model's inputs go, and its logits come from."""
        return input_device(self.model)

    @property
    def cache_devices(self) -> frozenset[torch.device]:
        """Where its caches lie."""
        return frozenset(place.device for place in self.placements)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's keys and values in all layers."""
        return sum(2 * self.kv_heads * self.head_dim * p.dtype.itemsize for p in self.placements)

    def new_cache(self, capacity: int) -> RowCache:
        """An empty cache with room for `capacity` rows."""
        return RowCache(self.placements, capacity=capacity)

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
            logits = self.forward_chunk(token_ids, ActiveRows(chunk, capture, ready, record), cache)
        if logits is None:
            raise ValueError("no rows to compute")
        return logits

    @torch.inference_mode()
    def last_logits(
        self,
        token_ids: np.ndarray[Any, np.dtype[np.int64]],
        rows: RowSet,
        cache: RowCache,
        *,
        count: int,
    ) -> torch.Tensor:
        """Compute `rows`, and the logits of the last `count` of them in a call of their own.

        Args:
            token_ids, rows, cache: as for `forward_rows`.
            count: at least 1, at most all rows and `MAX_ROWS`.

        Returns:
            `[count, vocab]`.
        """
        positions = rows.positions()
        if not 0 < count <= min(len(positions), MAX_ROWS):
            raise ValueError(f"no logits of {count} of {len(positions)} rows in one call")
        mask = np.zeros(rows.stop, dtype=bool)
        mask[positions[:-count]] = True
        if mask.any():
            self.forward_rows(token_ids, RowSet.of_mask(mask), cache)
        mask[:] = False
        mask[positions[-count:]] = True
        return self._call(token_ids, ActiveRows(RowSet.of_mask(mask), None), cache, count)

    @torch.inference_mode()
    def forward_chunk(
        self, token_ids: np.ndarray[Any, np.dtype[np.int64]], active: ActiveRows, cache: RowCache
    ) -> torch.Tensor:
        """Compute the rows of one call; arguments and result as for `forward_rows`.

        Raises:
            LayerReached: the call was to end at a layer, and did.
        """
        return self._call(token_ids, active, cache, 1)[-1]

    def _call(
        self,
        token_ids: np.ndarray[Any, np.dtype[np.int64]],
        active: ActiveRows,
        cache: RowCache,
        count: int,
    ) -> torch.Tensor:
        """Logits of the last `count` rows of one call, `[count, vocab]`."""
        positions = active.rows.positions()
        ids = torch.from_numpy(token_ids[positions])[None].to(self.device)
        position_ids = torch.from_numpy(positions)[None].to(self.device)
        # As indices: of a number, Gemma 4 cuts the queries of its last layers too.
        keep = torch.arange(len(positions) - count, len(positions), device=ids.device)
        with self.lock, activated(active):
            output = self.model(
                input_ids=ids,
                position_ids=position_ids,
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_argument: cache},
            )
        cache.filled = max(cache.filled, active.rows.stop)
        logits: torch.Tensor = output.logits[0]
        return logits
