"""A few random tokens through a model of an unknown architecture, to find what can be done with it.

Three things are tested: rows recomputed one run at a time equal a full prefill (which fails for
any state beyond keys and values, and for attention that the adapter does not do); no row sees a
later key; and keys at shifted positions are rotated keys, which gives the rope of each layer. RoPE
attention depends on differences of positions only, so that the same tokens at positions shifted by
d have, in every layer, the same values and keys rotated by d.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from patchkv_agents.backends.transformers.adapter import ModelAdapter, RowCache, plain_call
from patchkv_agents.backends.transformers.quiet import quiet_transformers
from patchkv_agents.backends.transformers.row_attention import AttentionRecord, MaskFunction
from patchkv_agents.backends.transformers.verdict import SupportLevel, Verdict
from patchkv_agents.errors import UnsupportedModelError
from patchkv_agents.ranges import RowSet
from patchkv_kernels import Rope, RopeLayout, rotate_keys

TOKENS = 48
"""Length of the random input."""
SHIFT = 1000
"""Positions by which it is shifted, at most: enough to turn channels of low frequency."""
RUNS = RowSet(((5, 12), (20, 21), (30, 48)))
"""Rows that are recomputed."""
MARKED = slice(21, 30)
"""Rows that are not: they are changed, and rows before them must not notice."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""RMS error, as a share of the RMS, that rounding may leave."""


def probe(model: PreTrainedModel) -> tuple[Verdict, Rope | None]:
    """Find how far a model is supported by running it; its weights and settings stay.

    Returns:
        The verdict, and the rope where it is `APPROXIMATE`.
    """
    implementation = model.config._attn_implementation
    try:
        with quiet_transformers():
            _probe_rows(model)
            rope = find_rope(model)
    except UnsupportedModelError as error:
        return Verdict(SupportLevel.REFUSED, str(error)), None
    except Exception as error:  # code that nobody has seen, called as it may not expect
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Verdict(SupportLevel.REFUSED, f"a probe of it failed ({line})"), None
    finally:
        model.set_attn_implementation(implementation)
    if rope is None:
        reason = "its keys at other positions are no rotated keys"
        return Verdict(SupportLevel.EXACT, reason), None
    return Verdict(SupportLevel.APPROXIMATE), rope


def _probe_rows(model: PreTrainedModel) -> None:
    """Raise where rows through the adapter are not what the model computes by itself."""
    ids, dtype = _token_ids(model), model.dtype
    logits, expected = plain_call(model, ids)
    adapter = ModelAdapter(model)
    shape = (adapter.kv_heads, TOKENS, adapter.head_dim)
    if len(expected) != adapter.layers or expected[0][0].shape != shape:
        raise UnsupportedModelError(
            f"its {len(expected)} layers have keys and values {tuple(expected[0][0].shape)}, not "
            f"{adapter.layers} layers {shape}"
        )
    cache, record = adapter.new_cache(TOKENS), AttentionRecord()
    own = adapter.forward_rows(ids, RowSet.of_range(0, TOKENS), cache, record=record)
    _check_masks(record, adapter)
    if not (_close(own, logits, dtype) and _holds(cache, expected, dtype)):
        raise UnsupportedModelError("rows that run through it are not those of a full prefill")
    written = RUNS.positions()
    for shard in cache.shards:
        for rows in (shard.keys, shard.values):
            rows[:, :, written] = 100.0
    own = adapter.forward_rows(ids, RUNS, cache)
    if not (_close(own, logits, dtype) and _holds(cache, expected, dtype)):
        raise UnsupportedModelError("rows recomputed one run at a time are not those of a prefill")
    unmarked = [cache.layer(layer)[1][:, written] for layer in range(adapter.layers)]
    for shard in cache.shards:
        for rows in (shard.keys, shard.values):
            rows[:, :, MARKED] *= -10.0
    adapter.forward_rows(ids, RUNS, cache)
    marked = [cache.layer(layer)[1][:, written] for layer in range(adapter.layers)]
    before = torch.from_numpy(written < MARKED.start)
    for own, unmarked_own in zip(marked, unmarked, strict=True):
        if not _close(own[:, before], unmarked_own[:, before], dtype):
            raise UnsupportedModelError("a row of it sees later keys")
    if torch.equal(marked[-1][:, ~before], unmarked[-1][:, ~before]):
        raise UnsupportedModelError("its rows do not see the keys before them")


def _check_masks(record: AttentionRecord, adapter: ModelAdapter) -> None:
    """Raise unless each layer's mask is causal, within the window that it names or without one.

    The masks are asked for far positions too: a window may be wider than the probe is long.
    """
    for layer in range(adapter.layers):
        index = record.mask_of.get(layer)
        if index is None:
            raise UnsupportedModelError(
                f"layer {layer} does not call Transformers' attention functions with a mask of "
                "Transformers' making"
            )
        window = record.window_of[layer]
        if not _is_causal(record.masks[index], window, adapter.max_tokens):
            of = "causal" if window is None else f"a causal window of {window} tokens"
            raise UnsupportedModelError(f"the mask of layer {layer} is not {of}")


def _is_causal(mask: MaskFunction, window: int | None, tokens: int) -> bool:
    marks = {int(mark) for mark in np.geomspace(1, tokens, 64)} | {tokens}
    if window is not None:
        marks |= {mark + step for mark in (window, *marks) for step in (-1, 0, 1, window)}
    positions = torch.tensor(sorted(mark - 1 for mark in marks if 1 <= mark <= tokens))
    query, key = positions[:, None], positions[None, :]
    expected = key <= query
    if window is not None:
        expected &= key > query - window
    return torch.equal(mask(0, 0, query, key).expand_as(expected).cpu(), expected)


def find_rope(model: PreTrainedModel) -> Rope | None:
    """The rope by which the keys of shifted positions are rotated keys; None if there is none.

    Candidates are the frequencies that the model's modules hold, and none at all, in each layer.
    """
    ids = _token_ids(model)
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", SHIFT)
    shift = max(1, min(SHIFT, limit - TOKENS))
    _, rows = plain_call(model, ids)
    _, moved = plain_call(model, ids, shift=shift)
    candidates = {
        tuple(buffer.tolist()): buffer.detach().float().cpu().numpy()
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1
    }.values()
    for width in sorted({len(frequencies) for frequencies in candidates}):
        own = [frequencies for frequencies in candidates if len(frequencies) == width]
        own.append(np.zeros(width, dtype=np.float32))
        for layout in RopeLayout:
            found = [
                best
                for (before, _), (after, _) in zip(rows, moved, strict=True)
                if (best := _best(before, after, own, layout, shift, model.dtype)) is not None
            ]
            if len(found) == len(rows):
                by_layer = np.stack(found)
                same = bool((by_layer == by_layer[0]).all())
                return Rope(by_layer[0] if same else by_layer, layout)
    return None


def _best(
    keys: torch.Tensor,
    moved: torch.Tensor,
    candidates: list[npt.NDArray[np.float32]],
    layout: RopeLayout,
    shift: int,
    dtype: torch.dtype,
) -> npt.NDArray[np.float32] | None:
    """The frequencies that take one layer's `keys` to `moved`, `[kv_heads, tokens, head_dim]`."""
    positions = np.arange(keys.shape[1])
    errors = []
    for frequencies in candidates:
        if 2 * len(frequencies) > keys.shape[2]:
            return None
        cos, sin = Rope(frequencies, layout).rotation(positions, positions + shift, keys.device)
        rotated = torch.empty_like(keys)
        rotate_keys(keys, cos, sin, layout=layout, out=rotated)
        errors.append(_error(rotated, moved))
    best = int(np.argmin(errors))
    return candidates[best] if errors[best] < TOLERANCE.get(dtype, 1e-3) else None


def _token_ids(model: PreTrainedModel) -> npt.NDArray[np.int64]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return np.random.default_rng(0).integers(0, vocabulary, TOKENS)


def _holds(
    cache: RowCache, expected: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> bool:
    return all(
        _close(actual, wanted, dtype)
        for layer, rows in enumerate(expected)
        for actual, wanted in zip(cache.layer(layer), rows, strict=True)
    )


def _close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    return _error(actual, expected) < TOLERANCE.get(dtype, 1e-3)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference, as a share of the RMS; infinite where something is not finite."""
    expected = expected.to(actual.device).float()
    error = (actual.float() - expected).square().mean() / expected.square().mean()
    return float(error.sqrt()) if bool(error.isfinite()) else float("inf")
