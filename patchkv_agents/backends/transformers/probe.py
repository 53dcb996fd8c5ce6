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
"""RMS error of a row, as a share of the RMS of all, that rounding may leave."""
MIN_SHARE = 0.6
"""Share of rows that have to agree in 16 bits.

Where rounding makes an expert flip, the rows of that token and of some behind it differ; of a model
that the adapter gets wrong, hardly any row agrees."""
FAR = 1 << 17
"""Length that the cache pretends to have."""


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
    cache, record = adapter.new_cache(TOKENS), AttentionRecord()
    own = adapter.forward_rows(ids, RowSet.of_range(0, TOKENS), cache, record=record)
    _check_masks(record, adapter)
    if not (_is_close(own, logits, dtype) and _holds(cache, expected, dtype)):
        raise UnsupportedModelError("rows that run through it are not those of a full prefill")
    # A cache that says it is longer: what depends on its length would differ at far positions.
    cache.filled = max(TOKENS, min(FAR, adapter.max_tokens))
    written = RUNS.positions()
    for shard in cache.shards:
        for rows in (shard.keys, shard.values):
            rows[:, :, written] = 100.0
    own = adapter.forward_rows(ids, RUNS, cache)
    if not (_is_close(own, logits, dtype) and _holds(cache, expected, dtype)):
        raise UnsupportedModelError("rows recomputed one run at a time are not those of a prefill")
    unmarked = [cache.layer(layer)[1][:, written] for layer in range(adapter.layers)]
    for shard in cache.shards:
        for rows in (shard.keys, shard.values):
            rows[:, :, MARKED] *= -10.0
    adapter.forward_rows(ids, RUNS, cache)
    marked = [cache.layer(layer)[1][:, written] for layer in range(adapter.layers)]
    before = torch.from_numpy(written < MARKED.start)
    for own, unmarked_own in zip(marked, unmarked, strict=True):
        if not _rows_close(own[:, before], unmarked_own[:, before], dtype):
            raise UnsupportedModelError("a row of it sees later keys")
    if torch.equal(marked[-1][:, ~before], unmarked[-1][:, ~before]):
        raise UnsupportedModelError("its rows do not see the keys before them")


def _check_masks(record: AttentionRecord, adapter: ModelAdapter) -> None:
    """Raise unless each layer's mask is causal, within the window that it names or without one.

    The masks are asked for far positions too: a window may be wider than the probe is long.
    """
    text = adapter.model.config.get_text_config(decoder=True)
    for layer in range(text.num_hidden_layers):
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
    for (_, before), (_, after) in zip(rows, moved, strict=True):
        if not _rows_close(after, before, model.dtype):
            return None  # attention depends on more than differences of positions
    candidates = {
        tuple(buffer.tolist()): buffer.detach().float().cpu().numpy()
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1
    }
    still = np.zeros(1, dtype=np.float32)
    for layout in RopeLayout:
        found = [
            best
            for (before, _), (after, _) in zip(rows, moved, strict=True)
            if (best := _best(before, after, [*candidates.values(), still], layout, shift))
            is not None
        ]
        if len(found) == len(rows):
            return _joined_rope(found, layout)
    return None


def _joined_rope(found: list[npt.NDArray[np.float32]], layout: RopeLayout) -> Rope:
    """The rope of layers with these frequencies; layers that do not rotate take any width."""
    moving = [len(frequencies) for frequencies in found if frequencies.any()]
    width = max(moving, default=1)
    widths = tuple(len(own) if own.any() else min(moving, default=1) for own in found)
    by_layer = np.stack([np.pad(own, (0, width - len(own))) for own in found])
    if bool((by_layer == by_layer[0]).all()) and len(set(widths)) == 1:
        return Rope(by_layer[0], layout)
    return Rope(by_layer, layout, None if len(set(widths)) == 1 else widths)


def _best(
    keys: torch.Tensor,
    moved: torch.Tensor,
    candidates: list[npt.NDArray[np.float32]],
    layout: RopeLayout,
    shift: int,
) -> npt.NDArray[np.float32] | None:
    """The frequencies that take one layer's `keys` to `moved`, `[kv_heads, tokens, head_dim]`."""
    positions = np.arange(keys.shape[1])
    errors = []
    for frequencies in candidates:
        if 2 * len(frequencies) > keys.shape[2]:
            errors.append(torch.full(keys.shape[1:2], torch.inf))
            continue
        cos, sin = Rope(frequencies, layout).rotation(positions, positions + shift, keys.device)
        rotated = torch.empty_like(keys)
        rotate_keys(keys, cos, sin, layout=layout, out=rotated)
        errors.append(_row_errors(rotated, moved))
    best = int(np.argmin([float(error.nanmedian()) for error in errors]))
    return candidates[best] if _agree(errors[best], keys.dtype) else None


def _token_ids(model: PreTrainedModel) -> npt.NDArray[np.int64]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return np.random.default_rng(0).integers(0, vocabulary, TOKENS)


def _holds(
    cache: RowCache, expected: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> bool:
    return all(
        _rows_close(actual[:, : wanted.shape[1]], wanted, dtype)
        for layer, rows in enumerate(expected)
        for actual, wanted in zip(cache.layer(layer), rows, strict=True)
    )


def _is_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits agree. In 16 bits one expert that flips changes them, and rows decide."""
    if dtype.itemsize < 4:
        return bool(actual.isfinite().all())
    return bool(_row_errors(actual[None, None], expected[None, None])[0] < TOLERANCE[torch.float32])


def _rows_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether rows `[kv_heads, tokens, width]` agree."""
    return _agree(_row_errors(actual, expected), dtype)


def _agree(errors: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether enough rows agree: all, or in 16 bits, where experts flip, most of them."""
    tolerance = TOLERANCE.get(dtype, 1e-3)
    if dtype.itemsize < 4:
        return float((errors < tolerance).float().mean()) >= MIN_SHARE
    return bool((errors < tolerance).all())


def _row_errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """RMS of each row's difference, as a share of the RMS of all rows; `[tokens]`.

    Infinite where something is not finite.
    """
    expected = expected.to(actual.device).float()
    scale = expected.square().mean().clamp_min(1e-30)
    errors = ((actual.float() - expected).square().mean(dim=(0, 2)) / scale).sqrt()
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf).cpu()
