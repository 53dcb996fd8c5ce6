"""The dirty window: how far behind an edit old state is wrong, and the regression that predicts it.

An observation is one edit (hunk) of a pair with what lies behind it, up to the next edit: the next
one's window takes over there. Its oracle boundary is fitted by linear quantile regression of
`log1p` lengths (see `patchkv_agents.recovery.window`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchkv_agents.alignment import Alignment
from patchkv_agents.profiling.drift import BlockDrift
from patchkv_agents.recovery.methods.window import FEATURES, WindowModel, window_features

MIN_STRETCH = 128
"""Fewest tokens between an edit and the next one: shorter stretches tell no boundary."""
ALL_FEATURES_FROM = 5 * (len(FEATURES) + 1)
"""Observations from which all features are used: five for each parameter."""
SUFFIX_FROM = 10
"""Observations from which the length of the suffix is used."""

_SUFFIX = FEATURES.index("suffix")

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Observation:
    """One edit and the drift behind it.

    Attributes:
        pair: id of the pair.
        old, new, suffix: tokens that the edit removed, that it brought, and that are aligned
            behind it, to the end of the context.
        stretch: tokens from the edit to the next one, or to the end.
        blocks: distance and value drift of each block of the stretch, in order.
    """

    pair: str
    old: int
    new: int
    suffix: int
    stretch: int
    blocks: tuple[tuple[int, float], ...]

    def to_json(self) -> dict[str, Any]:
        """The observation as JSON has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Observation:
        """The observation of which `to_json` made these fields."""
        blocks = tuple((int(distance), float(drift)) for distance, drift in fields["blocks"])
        return cls(**{**fields, "blocks": blocks})


def observations(
    pair: str, alignment: Alignment, blocks: Iterable[BlockDrift]
) -> list[Observation]:
    """The edits of a pair with at least `MIN_STRETCH` tokens behind them."""
    own: dict[int, list[tuple[int, float]]] = {}
    for block in blocks:
        found = block.distance, block.figures["value_drift"]
        own.setdefault(block.hunk, []).append(found)
    aligned = alignment.position_map() >= 0
    made = []
    for number, (hunk, stretch) in enumerate(
        zip(alignment.hunks, stretches(alignment), strict=True)
    ):
        if stretch >= MIN_STRETCH and number in own:
            made.append(
                Observation(
                    pair,
                    hunk.old_stop - hunk.old_start,
                    hunk.new_stop - hunk.new_start,
                    int(aligned[hunk.new_stop :].sum()),
                    stretch,
                    tuple(own[number]),
                )
            )
    return made


def stretches(alignment: Alignment) -> list[int]:
    """Tokens behind each edit, to the next one or to the end."""
    ends = [hunk.new_start for hunk in alignment.hunks[1:]] + [alignment.tokens_new]
    return [end - hunk.new_stop for hunk, end in zip(alignment.hunks, ends, strict=True)]


def oracle_boundary(observation: Observation, *, drift: float, share: float) -> int:
    """The least distance from which on at least a share of the blocks drifted no more than a limit.

    Candidates are the starts of blocks, so that no empty rest is one; where none will do, all of
    the stretch is dirty.

    Args:
        observation: an edit and the blocks behind it.
        drift: the limit (tau_V).
        share: of the blocks (gamma).
    """
    distances, drifts = (np.array(each) for each in zip(*observation.blocks, strict=True))
    clean = (drifts <= drift)[::-1]
    shares = (np.cumsum(clean) / np.arange(1, len(clean) + 1))[::-1]
    enough = np.flatnonzero(shares >= share)
    return int(distances[enough[0]]) if len(enough) else observation.stretch


@dataclass(frozen=True, slots=True)
class WindowFit:
    """A fitted model, and what it is worth.

    Attributes:
        drift, share, quantile: tau_V and gamma of the oracle boundary, and the quantile fitted.
        model: predicts the window.
        features: those that have a coefficient.
        note: why not all of them; empty if they are all there.
        mean_tokens: of the predicted windows of a pair, cut at the next edit; mean over the pairs
            that it was fitted to.
    """

    drift: float
    share: float
    quantile: float
    model: WindowModel
    features: tuple[str, ...]
    note: str
    mean_tokens: float


def fit_window(
    found: Sequence[Observation], *, drift: float, share: float, quantile: float
) -> WindowFit:
    """Fit the window's length to oracle boundaries. Every pair counts the same.

    With few observations, or features that hardly vary or vary together, seven parameters fit
    noise: then the suffix alone is used, or none, and the note says so.

    Args:
        found: at least one.
        drift, share: see `oracle_boundary`.
        quantile: between 0 and 1.
    """
    boundaries = [oracle_boundary(each, drift=drift, share=share) for each in found]
    target = np.log1p(np.array(boundaries, dtype=np.float64))
    features = window_features(*_sizes(found))
    weights = _pair_weights(found)
    columns, note = _usable_features(features)
    coefficients = np.zeros(len(FEATURES))
    if columns:
        intercept, coefficients[columns] = _regression(
            features[:, columns], target, weights, quantile
        )
    else:
        intercept = _weighted_quantile(target, weights, quantile)
    model = WindowModel(float(intercept), tuple(float(each) for each in coefficients))
    return WindowFit(
        drift,
        share,
        quantile,
        model,
        tuple(FEATURES[column] for column in columns),
        note,
        mean_tokens(model, found),
    )


def _sizes(found: Sequence[Observation]) -> tuple[npt.NDArray[np.int64], ...]:
    return tuple(
        np.array([getattr(each, name) for each in found], dtype=np.int64)
        for name in ("old", "new", "suffix")
    )


def _pair_weights(found: Sequence[Observation]) -> FloatArray:
    edits = Counter(each.pair for each in found)
    return np.array([1.0 / edits[each.pair] for each in found])


def _usable_features(features: FloatArray) -> tuple[list[int], str]:
    """Columns that the observations can tell apart, and why not all."""
    count = len(features)
    if count >= ALL_FEATURES_FROM and _independent(features):
        return list(range(len(FEATURES))), ""
    if count >= ALL_FEATURES_FROM:
        why = "edits and suffixes vary together"
    else:
        why = f"{count} observations are fewer than {ALL_FEATURES_FROM}"
    if count >= SUFFIX_FROM and _independent(features[:, [_SUFFIX]]):
        return [_SUFFIX], f"the suffix alone is used: {why}"
    if count >= SUFFIX_FROM:
        why = "suffixes hardly vary"
    return [], f"one length for all: {why}"


def _independent(features: FloatArray) -> bool:
    """Whether the columns vary, and no column is nearly a combination of others."""
    centred = features - features.mean(axis=0)
    spread = centred.std(axis=0)
    if (spread < 0.05).any():  # less than 5 % in a length
        return False
    singular = np.linalg.svd(centred / spread, compute_uv=False)
    return bool(singular[-1] > 1e-3 * singular[0])


def _regression(
    features: FloatArray, target: FloatArray, weights: FloatArray, quantile: float
) -> tuple[float, FloatArray]:
    from sklearn.linear_model import QuantileRegressor

    centre, spread = features.mean(axis=0), features.std(axis=0)
    fitted = QuantileRegressor(quantile=quantile, alpha=0.0, solver="highs").fit(
        (features - centre) / spread, target, sample_weight=weights
    )
    coefficients: FloatArray = fitted.coef_ / spread
    return float(fitted.intercept_ - coefficients @ centre), coefficients


def _weighted_quantile(values: FloatArray, weights: FloatArray, quantile: float) -> float:
    """The least value at or under which at least that share of the weight lies."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(reached, quantile - 1e-9)])


def predictions(model: WindowModel, found: Sequence[Observation]) -> npt.NDArray[np.int64]:
    """The predicted windows, cut at the next edit, int64 `[observations]`."""
    stretches = np.array([each.stretch for each in found], dtype=np.int64)
    return np.minimum(model.lengths(*_sizes(found)), stretches)


def mean_tokens(model: WindowModel, found: Sequence[Observation]) -> float:
    """Predicted tokens of all windows of a pair, mean over the pairs."""
    return float(predictions(model, found).sum() / len({each.pair for each in found}))


def coverage(fit: WindowFit, found: Sequence[Observation]) -> dict[str, Any]:
    """How a model does on pairs that it was not fitted to.

    Observed are only edits with at least `MIN_STRETCH` tokens behind them: others, and pairs
    that have no other, are counted nowhere.

    Returns:
        `edits` and `pairs`: share whose oracle boundary (of all their edits) is at or under the
        prediction, to be compared with the `quantile`; `extra_tokens`: mean of what is predicted
        beyond the boundary, a pair; `missing_tokens`: mean of what is missing; `n_edits` and
        `n_pairs`. Shares and means are None without observations.
    """
    if not found:
        empty = dict.fromkeys(("edits", "pairs", "extra_tokens", "missing_tokens"))
        return {"quantile": fit.quantile, **empty, "n_edits": 0, "n_pairs": 0}
    boundaries = np.array([oracle_boundary(e, drift=fit.drift, share=fit.share) for e in found])
    beyond = predictions(fit.model, found) - boundaries
    pairs = {each.pair for each in found}
    missed = {each.pair for each, rest in zip(found, beyond, strict=True) if rest < 0}
    weights = _pair_weights(found)
    return {
        "quantile": fit.quantile,
        "edits": float((weights * (beyond >= 0)).sum() / weights.sum()),
        "pairs": 1 - len(missed) / len(pairs),
        "extra_tokens": float(np.maximum(beyond, 0).sum() / len(pairs)),
        "missing_tokens": float(np.maximum(-beyond, 0).sum() / len(pairs)),
        "n_edits": len(found),
        "n_pairs": len(pairs),
    }


def sweep(
    found: Sequence[Observation],
    *,
    drifts: Iterable[float],
    shares: Iterable[float],
    quantiles: Iterable[float],
) -> list[WindowFit]:
    """A fit for each setting, the shortest mean window first."""
    grid = [(d, s, q) for d in drifts for s in shares for q in quantiles]
    fits = [fit_window(found, drift=d, share=s, quantile=q) for d, s, q in grid]
    return sorted(fits, key=lambda fit: fit.mean_tokens)


def distinct(fits: Sequence[WindowFit], *, step: float, most: int) -> list[WindowFit]:
    """At most `most` of the fits, whose mean windows differ by at least `step` tokens.

    Args:
        fits: in ascending order of their mean windows.
        step: tokens.
        most: evenly spaced among those that differ, the shortest and the longest included.
    """
    kept: list[WindowFit] = []
    for fit in fits:
        if not kept or fit.mean_tokens >= kept[-1].mean_tokens + step:
            kept.append(fit)
    if len(kept) <= most:
        return kept
    return [kept[int(n)] for n in np.linspace(0, len(kept) - 1, most).round()]
