"""Attention of the last rows of a sequence in plain torch, without a mask where possible."""

from __future__ import annotations

from typing import cast

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
) -> torch.Tensor:
    """Attention of the last rows of a sequence to the sequence.

    Args:
        query: `[1, heads, rows, head_dim]`, of the positions `[tokens - rows, tokens)`.
        key, value: `[1, kv_heads, tokens, head_dim]`.
        scaling: factor of the scores; None is `head_dim ** -0.5`.
        window: a row at position p sees the keys at `(p - window, p]`; None: at `[0, p]`.
        softcap: scores s become `softcap * tanh(s / softcap)` (Gemma 2, arXiv 2408.00118, 2.2).

    Returns:
        `[1, heads, rows, head_dim]`.
    """
    rows, tokens = query.shape[2], key.shape[2]
    mask = None
    if window is not None and tokens > window:
        first = max(0, tokens - rows + 1 - window)  # the first key that any of the rows sees
        key, value, tokens = key[:, :, first:], value[:, :, first:], tokens - first
        if rows > 1:
            mask = causal_mask(rows, tokens, query.device, window=window)
    if softcap is not None:
        return softcapped_attention(query, key, value, mask, scaling=scaling, softcap=softcap)
    if mask is not None:
        groups = query.shape[1] // key.shape[1]
        key, value = _repeated(key, groups), _repeated(value, groups)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    if query.device.type == "cpu":
        return _causal_on_cpu(query, key, value, tokens - rows, scaling)
    bias = causal_lower_right(rows, tokens)
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scaling, enable_gqa=gqa
    )


def scattered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: IntArray,
    *,
    scaling: float | None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of rows that do not lie together: each to the keys up to its own position.

    Worth it where many short runs would each need a call of `run_attention`.

    Args:
        query: `[1, heads, rows, head_dim]`.
        key, value: `[1, kv_heads, tokens, head_dim]`, up to the last of the rows at least.
        positions: of the rows, ascending, int64 `[rows]`.
        scaling, window, softcap: as for `run_attention`.

    Returns:
        `[1, heads, rows, head_dim]`.
    """
    first, stop = int(positions[0]), int(positions[-1]) + 1
    on_cpu = query.device.type == "cpu" and window is None and softcap is None
    begin = first if on_cpu else 0 if window is None else max(0, first + 1 - window)
    keys, rows = torch.arange(begin, stop), torch.from_numpy(positions)[:, None]
    seen = keys <= rows if window is None else (keys <= rows) & (keys > rows - window)
    seen = seen.to(query.device)
    if on_cpu:
        return _masked_on_cpu(query, key[:, :, :stop], value[:, :, :stop], seen, scaling)
    key, value = key[:, :, begin:stop], value[:, :, begin:stop]
    if softcap is not None:
        return softcapped_attention(query, key, value, seen, scaling=scaling, softcap=softcap)
    groups = query.shape[1] // key.shape[1]
    key, value = _repeated(key, groups), _repeated(value, groups)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)


def causal_mask(
    rows: int, tokens: int, device: torch.device, *, window: int | None = None
) -> torch.Tensor:
    """Which keys the last `rows` of `tokens` rows see, bool `[rows, tokens]`."""
    mask = torch.ones(rows, tokens, dtype=torch.bool, device=device).tril(tokens - rows)
    return mask if window is None else mask.triu(tokens - rows + 1 - window)


def softcapped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attention with capped scores, which SDPA does not have: all scores are in memory at once.

    Args:
        query: `[batch, heads, rows, head_dim]`.
        key, value: `[batch, kv_heads, tokens, head_dim]`.
        mask: bool, broadcast to `[batch, heads, rows, tokens]`; None is causal, the rows last.
        scaling, softcap: as for `run_attention`.
    """
    if mask is None:
        mask = causal_mask(query.shape[2], key.shape[2], query.device)
    groups = query.shape[1] // key.shape[1]
    factor = query.shape[3] ** -0.5 if scaling is None else scaling
    scores = query @ _repeated(key, groups).transpose(2, 3) * (factor / softcap)
    # Not minus infinity: a padding row that sees no key would be NaN, and spread.
    scores = (scores.tanh() * softcap).masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return weights @ _repeated(value, groups)


def _repeated(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Each head of `[batch, kv_heads, tokens, head_dim]` as often as query heads share it."""
    if groups == 1:
        return rows
    batch, kv_heads, tokens, head_dim = rows.shape
    wide = rows[:, :, None].expand(batch, kv_heads, groups, tokens, head_dim)
    return wide.reshape(batch, -1, tokens, head_dim)


def _causal_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scaling: float | None
) -> torch.Tensor:
    """Attention of one run of rows on CPU: the past without a mask, its own triangle causally.

    The two parts are merged by their log-sum-exp. With the query heads of a group folded into
    rows, the past needs no copy of its keys, and no mask is ever made. Shapes as for
    `run_attention`; the rows begin at position `start`.
    """
    _, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own_key = _repeated(key[:, :, start:], heads // kv_heads)
    own_value = _repeated(value[:, :, start:], heads // kv_heads)
    own, own_lse = flash(query, own_key, own_value, 0.0, True, scale=scaling)
    if start == 0:
        return cast("torch.Tensor", own)
    folded = query.reshape(1, kv_heads, -1, head_dim)
    past, past_lse = flash(
        folded, key[:, :, :start], value[:, :, :start], 0.0, False, scale=scaling
    )
    weight = torch.sigmoid(own_lse - past_lse.reshape(1, heads, rows)).unsqueeze(-1)
    return torch.lerp(past.reshape_as(own), own, weight.to(own.dtype))


def _masked_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
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
    return cast("torch.Tensor", own.reshape(1, heads, rows, head_dim))
