"""Attention of the last rows of a sequence in plain torch, without a mask where possible."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from patchkv_agents.ranges import IntArray


def run_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last rows of a sequence to the sequence.

    Args:
        query: `[1, heads, rows, head_dim]`, of the positions `[tokens - rows, tokens)`.
        key, value: `[1, kv_heads, tokens, head_dim]`; values may have a width of their own.
        scaling: factor of the scores; None is `head_dim ** -0.5`.
        window: a row at position p sees the keys at `(p - window, p]`; None: at `[0, p]`.
        softcap: scores s become `softcap * tanh(s / softcap)` (Gemma 2, arXiv 2408.00118, 2.2).
        sinks: a score of each head that takes part in the softmax and has no value, `[heads]`
            (gpt-oss, arXiv 2508.10925, 2.1).

    Returns:
        `[1, heads, rows, width of the values]`.
    """
    query, key, value, width, scaling = _even(query, key, value, scaling)
    rows, tokens = query.shape[2], key.shape[2]
    mask = None
    if window is not None and tokens > window:
        first = max(0, tokens - rows + 1 - window)  # the first key that any of the rows sees
        key, value, tokens = key[:, :, first:], value[:, :, first:], tokens - first
        if rows > 1:
            mask = causal_mask(rows, tokens, query.device, window=window)
    if softcap is not None:
        output = explicit_attention(
            query, key, value, mask, scaling=scaling, softcap=softcap, sinks=sinks
        )
        return output[..., :width]
    if query.device.type == "cpu" and mask is None:
        output, lse = _causal_on_cpu(query, key, value, tokens - rows, scaling)
        return _with_sinks(output, lse, sinks)[..., :width]
    if query.device.type == "cpu" and mask is not None and sinks is not None:
        output, lse = _masked_on_cpu(query, key, value, mask, scaling)
        return _with_sinks(output, lse, sinks)[..., :width]
    if sinks is not None:
        query, key, value, scaling = sink_as_key(query, key, value, sinks, scaling)
        mask = None if mask is None else F.pad(mask, (1, 0), value=True)
    return _sdpa(query, key, value, mask, scaling)[..., :width]


def scattered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: IntArray,
    *,
    scaling: float | None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of rows that do not lie together: each to the keys up to its own position.

    Worth it where many short runs would each need a call of `run_attention`.

    Args:
        query: `[1, heads, rows, head_dim]`.
        key, value: `[1, kv_heads, tokens, head_dim]`, up to the last of the rows at least.
        positions: of the rows, ascending, int64 `[rows]`.
        scaling, window, softcap, sinks: as for `run_attention`.

    Returns:
        `[1, heads, rows, width of the values]`.
    """
    query, key, value, width, scaling = _even(query, key, value, scaling)
    first, stop = int(positions[0]), int(positions[-1]) + 1
    on_cpu = query.device.type == "cpu" and softcap is None
    on_cpu = on_cpu and (window is None or sinks is not None)
    begin = 0 if window is None else max(0, first + 1 - window)
    begin = first if on_cpu and window is None else begin
    keys, rows = torch.arange(begin, stop), torch.from_numpy(positions)[:, None]
    seen = keys <= rows if window is None else (keys <= rows) & (keys > rows - window)
    seen = seen.to(query.device)
    start = 0 if on_cpu and window is None else begin
    key, value = key[:, :, start:stop], value[:, :, start:stop]
    if on_cpu:
        output, lse = _masked_on_cpu(query, key, value, seen, scaling)
        return _with_sinks(output, lse, sinks)[..., :width]
    if softcap is not None:
        output = explicit_attention(
            query, key, value, seen, scaling=scaling, softcap=softcap, sinks=sinks
        )
        return output[..., :width]
    if sinks is not None:
        query, key, value, scaling = sink_as_key(query, key, value, sinks, scaling)
        seen = F.pad(seen, (1, 0), value=True)
    return _sdpa(query, key, value, seen, scaling)[..., :width]


def sink_as_key(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    scaling: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """A token in front of the sequence that every row sees, with the sinks as scores and no value.

    For kernels that give no log-sum-exp. One further channel of the queries holds the sinks, and
    of all keys only the new one has it; a multiple of 8 channels suits the kernels.

    Args:
        query: `[..., heads, rows, head_dim]`.
        key, value: `[..., kv_heads, tokens, head_dim]`.
        sinks: `[heads]`.
        scaling: factor of the scores; None is `head_dim ** -0.5`.

    Returns:
        Query, key and value with more channels, and the factor of the scores.
    """
    width = query.shape[-1]
    factor = width**-0.5 if scaling is None else scaling
    query, key, value = (F.pad(tensor, (0, 8)) for tensor in (query, key, value))
    query[..., width] = (sinks.to(query.dtype) / factor)[:, None]
    key, value = F.pad(key, (0, 0, 1, 0)), F.pad(value, (0, 0, 1, 0))
    key[..., 0, width] = 1.0
    return query, key, value, factor


def causal_mask(
    rows: int, tokens: int, device: torch.device, *, window: int | None = None
) -> torch.Tensor:
    """Which keys the last `rows` of `tokens` rows see, bool `[rows, tokens]`."""
    mask = torch.ones(rows, tokens, dtype=torch.bool, device=device).tril(tokens - rows)
    return mask if window is None else mask.triu(tokens - rows + 1 - window)


def explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention for which SDPA lacks something: all scores are in memory at once.

    Args:
        query: `[batch, heads, rows, head_dim]`.
        key, value: `[batch, kv_heads, tokens, head_dim]`.
        mask: bool, broadcast to `[batch, heads, rows, tokens]`; None is causal, the rows last.
        scaling, softcap, sinks: as for `run_attention`.
    """
    if mask is None:
        mask = causal_mask(query.shape[2], key.shape[2], query.device)
    groups = query.shape[1] // key.shape[1]
    factor = query.shape[3] ** -0.5 if scaling is None else scaling
    scores = query @ _repeated(key, groups).transpose(2, 3)
    scores = scores * factor if softcap is None else (scores * (factor / softcap)).tanh() * softcap
    # Not minus infinity: a padding row that sees no key would be NaN, and spread.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[2]] @ _repeated(value, groups)


def _even(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, float | None]:
    """Queries, keys and values of one width, as kernels want them, and the values' own width.

    Latent attention has values of another width than keys; zeros change no score.
    """
    width, own = query.shape[3], value.shape[3]
    if own < width:
        value = F.pad(value, (0, width - own))
    elif own > width:
        scaling = width**-0.5 if scaling is None else scaling
        query, key = (F.pad(tensor, (0, own - width)) for tensor in (query, key))
    return query, key, value, own, scaling


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """SDPA with a mask, or causally, the rows last."""
    if mask is not None:
        groups = query.shape[1] // key.shape[1]
        key, value = _repeated(key, groups), _repeated(value, groups)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    bias = causal_lower_right(query.shape[2], key.shape[2])
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scaling, enable_gqa=gqa
    )


def _with_sinks(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The output `[1, heads, rows, width]` of a softmax in which sinks take part too.

    Args:
        output: without them.
        lse: log-sum-exp of the scores, `[1, heads, rows]`.
        sinks: `[heads]`.
    """
    if sinks is None:
        return output
    weight = torch.sigmoid(lse.float() - sinks.float()[:, None])
    return output * weight.unsqueeze(-1).to(output.dtype)


def _repeated(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Each head of `[batch, kv_heads, tokens, head_dim]` as often as query heads share it."""
    if groups == 1:
        return rows
    batch, kv_heads, tokens, head_dim = rows.shape
    wide = rows[:, :, None].expand(batch, kv_heads, groups, tokens, head_dim)
    return wide.reshape(batch, -1, tokens, head_dim)


def _causal_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one run of rows on CPU: the past without a mask, its own triangle causally.

    The two parts are merged by their log-sum-exp. With the query heads of a group folded into
    rows, the past needs no copy of its keys, and no mask is ever made. Shapes as for
    `run_attention`; the rows begin at position `start`. Returned is the log-sum-exp of the scores
    too, `[1, heads, rows]`.
    """
    _, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own_key = _repeated(key[:, :, start:], heads // kv_heads)
    own_value = _repeated(value[:, :, start:], heads // kv_heads)
    own, own_lse = flash(query, own_key, own_value, 0.0, True, scale=scaling)
    if start == 0:
        return own, own_lse
    folded = query.reshape(1, kv_heads, -1, head_dim)
    past, past_lse = flash(
        folded, key[:, :, :start], value[:, :, :start], 0.0, False, scale=scaling
    )
    past_lse = past_lse.reshape(1, heads, rows)
    weight = torch.sigmoid(own_lse - past_lse).unsqueeze(-1)
    merged = torch.lerp(past.reshape_as(own), own, weight.to(own.dtype))
    return merged, torch.logaddexp(own_lse, past_lse)


def _masked_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scaling: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_causal_on_cpu`, for rows that all see the keys in front of the last `seen.shape[1]`.

    Args:
        query, key, value: as for `run_attention`.
        seen: which of the last keys each row sees, at least one, bool `[rows, last keys]`.
        scaling: as for `run_attention`.
    """
    _, heads, rows, head_dim = query.shape
    kv_heads, start = key.shape[1], key.shape[2] - seen.shape[1]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    folded = query.reshape(1, kv_heads, -1, head_dim)
    mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, float("-inf"))
    mask = mask.repeat(heads // kv_heads, 1)
    own, own_lse = flash(
        folded, key[:, :, start:], value[:, :, start:], 0.0, False, attn_mask=mask, scale=scaling
    )
    if start > 0:
        past, past_lse = flash(
            folded, key[:, :, :start], value[:, :, :start], 0.0, False, scale=scaling
        )
        weight = torch.sigmoid(own_lse - past_lse).reshape(1, kv_heads, -1, 1)
        own = torch.lerp(past, own, weight.to(own.dtype))
        own_lse = torch.logaddexp(own_lse, past_lse)
    return own.reshape(1, heads, rows, head_dim), own_lse.reshape(1, heads, rows)
