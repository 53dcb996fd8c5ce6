"""The attention function that is registered with Transformers, and what it is told of a call.

Inside `forward_rows` it works on the rows of the call: a row at position p sees exactly the keys
at positions <= p, or the last of them in a layer with a sliding window. Elsewhere it is SDPA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from patchkv_agents.backends.transformers.attention import (
    explicit_attention,
    run_attention,
    scattered_attention,
)
from patchkv_agents.backends.transformers.capture import AttentionCapture
from patchkv_agents.errors import UnsupportedModelError
from patchkv_agents.ranges import RowSet

ATTENTION_NAME = "patchkv"
"""The attention implementation under which it is registered."""

LONG_RUN = 16
"""Consecutive rows from which a run has an attention call of its own."""
SPAN_ROWS = 64
"""Most rows of short runs that share a call."""
SPAN_TOKENS = 1024
"""Most tokens from the first to the last of them: between them a mask is needed."""

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Which keys queries see: (batch, head, query positions, key positions) to bool."""

_UNDERSTOOD = frozenset({"sliding_window", "softcap", "is_causal", "s_aux"})
"""Arguments of an attention call that change its result, and are heeded."""
_WITHOUT_EFFECT = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions"})


@dataclass(slots=True)
class AttentionRecord:
    """What a model asks of its attention function, for the probe of unknown models.

    Attributes:
        masks: the mask functions that the model made, in order.
        mask_of: by layer, which of them came with the attention call, or None.
        window_of: by layer, the width of its sliding window, or None.
    """

    masks: list[MaskFunction] = field(default_factory=list)
    mask_of: dict[int, int | None] = field(default_factory=dict)
    window_of: dict[int, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ActiveRows:
    """What the attention function and the cache must know of the call under way.

    Attributes:
        rows: the rows that run.
        capture: collects attention mass, or None.
        ready: is called with a layer's index before the layer reads the cache, or None.
        record: collects what the model asks of its attention, or None.
        seen_as: as which rows they attend, if not as those that they are; as many, in order.
        fresh: is called with a layer's index and its fresh keys and values, `[1, kv_heads, rows,
            head_dim]`, before they are written into the cache, or None.
        last_layer: ends the call with `LayerReached` once this layer's keys and values are
            written, if given.
    """

    rows: RowSet
    capture: AttentionCapture | None = None
    ready: Callable[[int], None] | None = None
    record: AttentionRecord | None = None
    seen_as: RowSet | None = None
    fresh: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None
    last_layer: int | None = None

    @property
    def standing(self) -> RowSet:
        """The rows as which they attend."""
        return self.rows if self.seen_as is None else self.seen_as


class LayerReached(Exception):
    """Ends a forward call that was to run up to one layer only. Never leaves the engine."""


_ACTIVE: ContextVar[ActiveRows | None] = ContextVar("patchkv_active_rows", default=None)


def active_rows() -> ActiveRows | None:
    """The call under way, if there is one."""
    return _ACTIVE.get()


@contextmanager
def activated(active: ActiveRows) -> Iterator[None]:
    """Make the attention function work on the rows of this call."""
    token = _ACTIVE.set(active)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


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
        attention_mask: what `_mask` returned.
        scaling: factor of the scores; None is `head_dim ** -0.5`.
        dropout: used outside `forward_rows` only.
        kwargs: `sliding_window`, `softcap` and `s_aux` (sinks) where the layer has them, and
            others.

    Returns:
        `[1, rows, heads, head_dim]`, and None for the weights.

    Raises:
        UnsupportedModelError: the layer asks for what this function does not do.
    """
    active = _ACTIVE.get()
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if active is None:
        if softcap is not None or sinks is not None:
            output = explicit_attention(
                query, key, value, attention_mask, scaling=scaling, softcap=softcap, sinks=sinks
            )
            return output.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    _check_arguments(module, kwargs)
    layer, window = int(module.layer_idx), kwargs.get("sliding_window")  # type: ignore[arg-type]
    if active.record is not None:
        active.record.mask_of[layer] = None
        if attention_mask is not None and attention_mask.dtype == torch.int64:  # from `_mask`
            active.record.mask_of[layer] = int(attention_mask.flatten()[0])
        active.record.window_of[layer] = window
    settings: dict[str, Any] = {
        "scaling": scaling,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
    }
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    for span in _spans(active.standing):
        first, last = span[0], span[-1]
        rows, stop = slice(first[0], last[0] + last[2] - last[1]), last[2]
        run, keys, values = query[:, :, rows], key[:, :, :stop], value[:, :, :stop]
        if len(span) == 1:
            part = run_attention(run, keys, values, **settings)
        else:
            positions = np.concatenate([np.arange(start, stop) for _, start, stop in span])
            part = scattered_attention(run, keys, values, positions, **settings)
        output[:, rows] = part.transpose(1, 2)
    if active.capture is not None and window is None and softcap is None:
        for offset, start, stop in active.standing.packed():
            run = query[0, :, offset : offset + stop - start]
            active.capture.observe(layer, start, run, key[0, :, :stop], scaling, sinks)
    return output, None


@lru_cache(maxsize=8)
def _spans(rows: RowSet) -> Sequence[Sequence[tuple[int, int, int]]]:
    """The runs of a row set, `(offset, start, stop)`, in groups that share an attention call."""
    spans: list[list[tuple[int, int, int]]] = []
    open_span = False
    for run in rows.packed():
        short = run[2] - run[1] < LONG_RUN
        if short and open_span:
            first = spans[-1][0]
            open_span = (
                run[0] + run[2] - run[1] - first[0] <= SPAN_ROWS
                and run[2] - first[1] <= SPAN_TOKENS
            )
        if short and open_span:
            spans[-1].append(run)
        else:
            spans.append([run])
        open_span = short
    return spans


def _check_arguments(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse an attention call that asks for what `run_attention` does not do."""
    for name, argument in kwargs.items():
        if argument is None or argument is False or name in _WITHOUT_EFFECT:
            continue
        if name not in _UNDERSTOOD:
            raise UnsupportedModelError(f"its attention takes '{name}', which is not known here")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedModelError("its attention is not causal")


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask inside `forward_rows`, where the attention function is causal by itself.

    For a record, a stand-in that tells the attention function which mask it is.
    """
    active = _ACTIVE.get()
    if active is None:
        return sdpa_mask(*args, **kwargs)
    if active.record is None:
        return None
    active.record.masks.append(kwargs["mask_function"])
    index = torch.tensor(len(active.record.masks) - 1, device=kwargs.get("device"))
    return index.expand(1, 1, kwargs["q_length"], kwargs["kv_length"])


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, _mask)
