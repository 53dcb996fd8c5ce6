"""Storage precision: chooses the format of each block by the risk of quantising it.

A row matters as much as later rows attend to it. The risk of a row is the attention it received,
relative to the mean, times the error that 4-bit values would cause. Blocks of high risk get 8-bit
values, the few of very high risk 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from patchkv_agents.errors import InputError
from patchkv_kernels import PayloadFormat
from patchkv_kernels.quantize import Scratch, decode, decoded_scales, encode_groups

SAMPLED_LAYERS = 8
"""Layers, evenly spaced, from which a row's error is taken."""
_G4_PERCENTILE = 0.95


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """Thresholds on the risk of a block, and on the error of its rows.

    The risk of a row is `N * I_i * e_i`: the attention it received in units of the mean over the N
    tokens of the context, so that thresholds carry over between lengths, times the relative error
    that 4-bit values leave in it. A block's risk mixes the largest and the mean of its rows.

    The defaults were chosen on 12 contexts of HotpotQA at 1.2k to 1.8k tokens and two models (0.1B
    and 0.5B parameters). There they put 2 % of the blocks (the first one, to which every row
    attends) in 16 bits, and a tenth in 8-bit values.
    Chosen by attention, they lower the KL of the next token to a tenth; the same number chosen at
    random or by error alone changes little. Row errors are so similar that attention alone would
    choose the same blocks. The mean over a block's rows (alpha 0) does as well as the maximum, and
    its thresholds agree better between models.

    Attributes:
        alpha: weight of a block's largest row risk against the mean of its rows.
        tau_low: risk below which values may have 4 bits.
        tau_high: risk from which a block is stored in 16 bits.
        tau_4: largest error of a block's rows (95th percentile) with which values may have 4 bits.
            A guard: on the models measured, errors are near 0.1.
        format: the format of every block whatever its risk, if given.

    Raises:
        InputError: a value is out of its range.
    """

    alpha: float = 0.0
    tau_low: float = 0.15
    tau_high: float = 1.5
    tau_4: float = 0.2
    format: PayloadFormat | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise InputError(f"alpha is {self.alpha}: use 0 (mean of the rows) to 1 (largest)")
        if not 0.0 <= self.tau_low <= self.tau_high:
            raise InputError(
                f"tau_low is {self.tau_low} and tau_high {self.tau_high}: use 0 <= tau_low <= "
                "tau_high"
            )
        if not self.tau_4 >= 0.0:
            raise InputError(f"tau_4 is {self.tau_4}: use 0 or more")

    @classmethod
    def fixed(cls, format: PayloadFormat) -> PrecisionPolicy:
        """A policy with one format for every block, for comparisons."""
        return cls(format=format)

    @classmethod
    def lossless(cls) -> PrecisionPolicy:
        """Every block as the model wrote it."""
        return cls(format=PayloadFormat.NATIVE)

    @property
    def is_lossless(self) -> bool:
        """Whether rows come back as the model wrote them."""
        return self.format is PayloadFormat.NATIVE


def block_formats(
    policy: PrecisionPolicy,
    values: Sequence[torch.Tensor],
    ranges: Sequence[tuple[int, int, int]],
    scores: npt.NDArray[np.float32],
    *,
    tokens: int,
) -> list[PayloadFormat]:
    """The format of each block.

    Args:
        policy: decides.
        values: of each layer, `[kv_heads, capacity, head_dim]`, any devices; not changed.
        ranges: as for `patchkv_kernels.quantize_gather`.
        scores: attention mass of the rows of all ranges, in order, float32 `[rows]`, of a context
            in which all rows together have 1.
        tokens: of the whole context.
    """
    if policy.format is not None:
        return [policy.format] * len(ranges)
    lengths = np.array([stop - start for start, stop, _ in ranges])
    rows = np.concatenate([np.arange(start, stop) for start, stop, _ in ranges])
    errors = low_bit_errors(values, rows)
    return assign_formats(policy, scores, errors, lengths, tokens=tokens)


@torch.inference_mode()
def low_bit_errors(
    values: Sequence[torch.Tensor], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Relative L2 error that 4-bit values leave in each row, median over sampled layers.

    Args:
        values: of each layer, `[kv_heads, capacity, head_dim]`, any devices; not changed.
        rows: int64 `[n]`.

    Returns:
        float32 `[n]`; 0 for a row of zeros, NaN where a value is not finite.
    """
    layers = len(values)
    sampled = np.unique(np.linspace(0, layers - 1, min(layers, SAMPLED_LAYERS)).round())
    indices: dict[torch.device, torch.Tensor] = {}
    scratch = Scratch()
    errors: list[torch.Tensor] = []
    for layer in sampled.astype(int).tolist():
        device = values[layer].device
        if device not in indices:
            indices[device] = torch.from_numpy(rows).to(device)
        exact = values[layer].index_select(1, indices[device]).float()
        codes, scales = encode_groups(exact)
        stored = torch.empty_like(exact)
        decode(codes, decoded_scales(scales), out=stored, scratch=scratch)
        norm = exact.square().sum((0, 2)).sqrt()
        error = (stored - exact).square().sum((0, 2)).sqrt()
        errors.append((error / norm.where(norm != 0, 1.0)).to(values[0].device))
    result: npt.NDArray[np.float32] = torch.stack(errors).median(0).values.cpu().numpy()
    return result


def assign_formats(
    policy: PrecisionPolicy,
    scores: npt.NDArray[np.float32],
    errors: npt.NDArray[np.float32],
    lengths: npt.NDArray[np.int64],
    *,
    tokens: int,
) -> list[PayloadFormat]:
    """The format of each block, from the attention and the errors of its rows.

    The last rows of a context, after the queries whose attention was collected, have no score.
    Their values keep 8 bits. A block with a value that is not finite is stored in 16 bits.

    Args:
        policy: decides.
        scores: attention mass, float32 `[rows]`.
        errors: of 4-bit values, float32 `[rows]`.
        lengths: rows of each block, at least one each, in the order of the rows; int64 `[blocks]`.
        tokens: of the whole context.
    """
    risks = block_risks(policy.alpha, scores, errors, lengths, tokens=tokens)
    known = np.minimum.reduceat(scores, _starts(lengths)) > 0
    low_bits = (risks < policy.tau_low) & (high_errors(errors, lengths) <= policy.tau_4) & known
    full = (risks >= policy.tau_high) | ~np.isfinite(risks)
    formats = np.where(full, "f16", np.where(low_bits, "k8v4", "k8v8"))
    return [PayloadFormat(name) for name in formats.tolist()]


def block_risks(
    alpha: float,
    scores: npt.NDArray[np.float32],
    errors: npt.NDArray[np.float32],
    lengths: npt.NDArray[np.int64],
    *,
    tokens: int,
) -> npt.NDArray[np.float64]:
    """The risk of each block, `[blocks]`; see `PrecisionPolicy`, and `assign_formats`."""
    starts = _starts(lengths)
    risk = tokens * scores.astype(np.float64) * errors
    mean = np.add.reduceat(risk, starts) / lengths
    risks: npt.NDArray[np.float64] = alpha * np.maximum.reduceat(risk, starts) + (1 - alpha) * mean
    return risks


def high_errors(
    errors: npt.NDArray[np.float32], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """The 95th percentile of each block's errors, which `tau_4` limits; float32 `[blocks]`."""
    by_error = errors[np.lexsort((errors, np.repeat(np.arange(len(lengths)), lengths)))]
    place = np.ceil(_G4_PERCENTILE * lengths).astype(np.int64) - 1
    largest: npt.NDArray[np.float32] = by_error[_starts(lengths) + place]
    return largest


def _starts(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)[:-1]])
