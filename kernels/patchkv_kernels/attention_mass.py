"""Attention mass: the share of the attention of some query rows that each token or block received.

Softmax rows are summed as they are computed and never stored: over query rows and heads for the
mass per token, over blocks and heads for the block-to-block map. Both functions add to a sum
that the caller owns, so that chunks of a prefill, decode steps and layers accumulate. CUDA tensors
go to the Triton kernels, all others to the torch code here, which is also their reference.
"""

from __future__ import annotations

import torch

from patchkv_kernels.errors import PayloadError


def add_received_mass(
    mass: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scaling: float | None = None,
) -> None:
    """Add the attention that each token receives from `query`, summed over rows and heads.

    The query rows are the last ones of the keys: row r has position `tokens - rows + r` and sees
    the keys up to itself. Each adds `heads` to the sum of `mass`.

    Args:
        mass: float32 `[at least tokens]`; its first `tokens` entries are changed in place.
        query: `[heads, rows, head_dim]`, rotated, any strides and floating dtype.
        key: `[kv_heads, tokens, head_dim]`, rotated, any strides; not changed.
        scaling: factor of the scores; None is `head_dim ** -0.5`.

    Raises:
        PayloadError: the shapes do not fit together.
    """
    check_attention(query, key)
    if mass.dtype != torch.float32 or mass.ndim != 1 or len(mass) < key.shape[1]:
        raise PayloadError(f"mass must be float32 with at least {key.shape[1]} entries")
    if query.is_cuda:
        from patchkv_kernels.triton_attention_mass import add_received_mass_triton

        # Triton launches on the current device.
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            return add_received_mass_triton(mass, query, key, scaling=scaling)
    add_received_mass_torch(mass, query, key, scaling=scaling)


def add_block_mass(
    mass: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    block_size: int,
    scaling: float | None = None,
    row_stride: int = 1,
) -> None:
    """Add the attention that each block of queries gives to each block of keys, over all heads.

    Args:
        mass: float32 `[query blocks, key blocks]` of the grid that starts at token 0; entry
            (a, b) gains what the given rows in block a attend to the tokens of block b. Changed
            in place.
        query, key, scaling: as for `add_received_mass`.
        block_size: tokens per block. The kernels take 32 and 64; other sizes run as torch code on
            any device.
        row_stride: use only the rows at positions one less than a multiple of it. The kernels
            take 1; other strides run as torch code.

    Raises:
        PayloadError: the shapes do not fit together.
    """
    check_attention(query, key)
    blocks = -(-key.shape[1] // block_size)
    if mass.dtype != torch.float32 or mass.ndim != 2 or min(mass.shape) < blocks:
        raise PayloadError(f"mass must be float32 with at least {blocks} blocks on both sides")
    if query.is_cuda and block_size in (32, 64) and row_stride == 1:
        from patchkv_kernels.triton_attention_mass import add_block_mass_triton

        # Triton launches on the current device.
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            return add_block_mass_triton(mass, query, key, block_size=block_size, scaling=scaling)
    add_block_mass_torch(
        mass, query, key, block_size=block_size, scaling=scaling, row_stride=row_stride
    )


def check_attention(query: torch.Tensor, key: torch.Tensor) -> None:
    """Check that `query` can be the last rows of a sequence with the keys `key`.

    Raises:
        PayloadError: it cannot.
    """
    fits = (
        query.ndim == key.ndim == 3
        and query.shape[2] == key.shape[2]
        and query.shape[0] % key.shape[0] == 0
        and 0 < query.shape[1] <= key.shape[1]
    )
    if not fits:
        raise PayloadError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} do not fit: give "
            "[heads, rows, head_dim] and [kv_heads, tokens, head_dim] with the rows at the end"
        )


def add_received_mass_torch(
    mass: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *, scaling: float | None = None
) -> None:
    """`add_received_mass` in torch: one product and one softmax for all heads and rows."""
    positions = torch.arange(key.shape[1] - query.shape[1], key.shape[1], device=key.device)
    received = _attention(query, key, positions, scaling).sum(dim=(0, 1))
    mass[: key.shape[1]] += received


def add_block_mass_torch(
    mass: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    block_size: int,
    scaling: float | None = None,
    row_stride: int = 1,
) -> None:
    """`add_block_mass` in torch, one kv head at a time: `[group, rows, tokens]` is held."""
    tokens = key.shape[1]
    first = tokens - query.shape[1]
    skipped = -(first + 1) % row_stride
    query = query[:, skipped::row_stride]
    if query.shape[1] == 0:
        return
    positions = torch.arange(first + skipped, tokens, row_stride, device=key.device)
    blocks = -(-tokens // block_size)
    group = query.shape[0] // key.shape[0]
    for kv_head in range(key.shape[0]):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        weights = _attention(query[heads], key[kv_head : kv_head + 1], positions, scaling)
        padded = torch.nn.functional.pad(weights.sum(dim=0), (0, blocks * block_size - tokens))
        pooled = padded.view(len(positions), blocks, block_size).sum(-1)
        mass[:, :blocks].index_add_(0, positions // block_size, pooled)


def _attention(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Softmax rows, float32 `[heads, rows, tokens]`, of queries at `positions` (ascending)."""
    heads, rows, head_dim = query.shape
    kv_heads, tokens, _ = key.shape
    factor = head_dim**-0.5 if scaling is None else scaling
    folded = query.reshape(kv_heads, -1, head_dim)
    scores = (torch.matmul(folded, key.transpose(1, 2)) * factor).float()
    scores = scores.view(heads, rows, tokens)
    # Every row sees the keys up to the first row's position.
    seen = int(positions[0])
    future = torch.arange(seen, tokens, device=key.device) > positions[:, None]
    scores[:, :, seen:].masked_fill_(future, float("-inf"))
    return scores.softmax(dim=-1)
