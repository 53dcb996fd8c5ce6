"""Choosing the thresholds of precision: the fewest stored bytes under a quality target.

Whole prompts are stored and restored, only their last token is computed, and the exact greedy
answer is forced upon that state: the divergence is caused by storage alone. Candidate thresholds
are quantiles of the risks found on the prompts. Rows in 16 bits count as exact here; what they
cost in float32 models (5e-7 nats measured) is far below any target. Bytes are those of payloads of
the whole prompt in one format, scales and tables counted, shared out by rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt

from patchkv_agents import __version__
from patchkv_agents.checkpoint.offload import BLOCK_SIZE
from patchkv_agents.checkpoint.precision import (
    PrecisionPolicy,
    assign_formats,
    block_risks,
    high_errors,
    low_bit_errors,
)
from patchkv_agents.context import render
from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError
from patchkv_agents.estimates import quantiles
from patchkv_agents.profiling.forced import ExactPrompt, exact_prompt
from patchkv_agents.profiling.json_log import JsonLog
from patchkv_agents.profiling.low_precision import LoweredPrompt, block_lengths
from patchkv_agents.profiling.pairs import ContextPair
from patchkv_agents.progress import Progress, ProgressCallback, ignore_progress
from patchkv_agents.ranges import IntArray
from patchkv_kernels import PayloadFormat

SCHEMA = 1
BLOCK_SIZES = (16, 32, 64, 128)
ALPHAS = (0.0, 0.5, 1.0)
"""Tried with blocks of `BLOCK_SIZE`; other sizes have the first alone."""
SHARES_16 = (0.0, 0.02, 0.05)
"""Shares of the blocks of highest risk that are stored in 16 bits."""
SHARES_8 = (0.0, 0.02, 0.05, 0.08, 0.12, 0.2, 1.0)
"""Shares of the blocks of highest risk whose values have at least 8 bits."""
_NEVER = 1e9
"""A threshold that no risk and no error reaches."""
_FORMATS = (PayloadFormat.F16, PayloadFormat.K8V8, PayloadFormat.K8V4)


@dataclass(frozen=True, slots=True)
class PrecisionTarget:
    """The largest divergence that storage alone may cause.

    Attributes:
        median_kl: over the prompts, nats; mean over an answer's tokens.
        p90_kl: the 90th percentile over the prompts.
    """

    median_kl: float = 0.001
    p90_kl: float = 0.01


@dataclass(frozen=True, slots=True)
class _Candidate:
    block_size: int
    policy: PrecisionPolicy


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """What is known of a prompt's rows; float32 `[stored]`."""

    tokens: int
    scores: npt.NDArray[np.float32]
    errors: npt.NDArray[np.float32]

    def lengths(self, block_size: int) -> IntArray:
        return np.array(block_lengths(len(self.errors), block_size))

    def formats(self, candidate: _Candidate) -> npt.NDArray[np.int8]:
        """Index in `_FORMATS` of each row's format, int8 `[stored]`."""
        lengths = self.lengths(candidate.block_size)
        chosen = assign_formats(
            candidate.policy, self.scores, self.errors, lengths, tokens=self.tokens
        )
        codes = np.array([_FORMATS.index(format) for format in chosen], dtype=np.int8)
        return np.repeat(codes, lengths)

    def risks(self, block_size: int, alpha: float) -> npt.NDArray[np.float64]:
        """Of the blocks whose attention is known."""
        lengths = self.lengths(block_size)
        risks = block_risks(alpha, self.scores, self.errors, lengths, tokens=self.tokens)
        known = risks[(risks > 0) & np.isfinite(risks)]
        return known


def fit_precision(
    engine: Engine,
    pairs: Sequence[ContextPair],
    *,
    target: PrecisionTarget | None = None,
    prompts: int = 8,
    log: Path | None = None,
    progress: ProgressCallback = ignore_progress,
) -> tuple[PrecisionPolicy, dict[str, Any]]:
    """Choose the thresholds on the old contexts of pairs.

    Blocks in storage have `BLOCK_SIZE` tokens; what other sizes would do is in the record. The
    default thresholds are among what is tried. The error limit `tau_4` of all others is the largest
    error seen: up to it, whatever they do is done without a limit.

    Args:
        engine: runs them. The states of one prompt are in memory at a time.
        pairs: for calibration; the contexts of different tasks come first.
        target: what must hold; candidates that miss it are chosen only if all do.
        prompts: most prompts, at least 2 of which must be there.
        log: file in which divergences are kept, so that an interrupted run goes on.
        progress: called at the beginning of each step.

    Returns:
        The thresholds, and a JSON object: `target`, `met`, `prompts` (their tokens), `chosen`,
        `defaults`, `uniform`, `frontier` (of each block size, fewest bytes first), `quality` and
        `tau_4` (words).
        Each entry has `payload_ratio` (to 16 bits), `kl_median`, `kl_p90`, `kl_mean`.

    Raises:
        InputError: fewer than 2 prompts, or one does not fit the model.
        UnsupportedModelError: rows of this model are always stored losslessly.
        PatchKVError: logits are not numbers.
    """
    wanted = target or PrecisionTarget()
    chosen_prompts = _prompts(engine, pairs, prompts)
    if len(chosen_prompts) < 2:
        raise InputError("precision needs at least 2 different contexts: give more pairs")
    known: list[_Rows] = []
    for done, token_ids in enumerate(chosen_prompts):
        doing = f"precision: errors of a prompt of {len(token_ids):,} tokens"
        progress(Progress(doing, done, len(chosen_prompts)))
        known.append(_rows(engine, exact_prompt(engine, token_ids, answer_tokens=1)))
    tau_4 = max(_high_error(rows) for rows in known)
    candidates = list(_candidates(known, _rounded_up(tau_4)))
    defaults = _Candidate(BLOCK_SIZE, PrecisionPolicy())
    uniform = [
        _Candidate(BLOCK_SIZE, replace(PrecisionPolicy(), tau_low=0.0, tau_high=_NEVER)),
        _Candidate(BLOCK_SIZE, PrecisionPolicy(tau_low=_NEVER, tau_high=_NEVER, tau_4=_NEVER)),
    ]
    every = [defaults, *uniform, *candidates]
    store = _store(log, engine)
    results = []
    for done, (token_ids, rows) in enumerate(zip(chosen_prompts, known, strict=True)):
        doing = f"precision: thresholds on a prompt of {len(token_ids):,} tokens"
        progress(Progress(doing, done, len(chosen_prompts)))
        results.append(_measured(engine, token_ids, rows, every, store))
    entries = [_entry(each, [own[i] for own in results], wanted) for i, each in enumerate(every)]
    (by_default, all_8, all_4), tried = entries[:3], entries[3:]
    own_size = [entry for entry in tried if entry["block_size"] == BLOCK_SIZE]
    best = min([by_default, *own_size], key=lambda entry: _order(entry, wanted))
    record = {
        "quality": "KL(exact || stored) in nats, mean over up to 16 greedy tokens, storage alone",
        "target": asdict(wanted),
        "met": best["meets"],
        "tau_4": _error_limit(best is by_default, best["meets"]),
        "prompts": [len(token_ids) for token_ids in chosen_prompts],
        "chosen": best,
        "defaults": by_default,
        "uniform": {"k8v8": all_8, "k8v4": all_4},
        "frontier": _frontier(tried),
    }
    names = ("alpha", "tau_low", "tau_high", "tau_4")
    return PrecisionPolicy(**{name: best[name] for name in names}), record


def _error_limit(is_default: bool, met: bool) -> str:
    """Where the error limit comes from, in words."""
    if is_default:
        return "the default"
    if met:
        return "the largest error seen: up to it, the target is met without a limit"
    return "the largest error seen, and the target is missed: a lower one was not tried"


def _prompts(engine: Engine, pairs: Sequence[ContextPair], most: int) -> list[IntArray]:
    """Different old contexts, those of different tasks first."""
    rank: dict[str, int] = {}
    order = []
    for pair in pairs:
        rank[pair.task] = rank.get(pair.task, -1) + 1
        order.append(rank[pair.task])
    found: dict[bytes, IntArray] = {}
    for index in sorted(range(len(pairs)), key=lambda index: order[index]):
        if len(found) == most:
            break
        token_ids = render(pairs[index].old, engine.tokenizer).token_ids
        engine.check_length(len(token_ids))
        found.setdefault(token_ids.tobytes(), token_ids)
    return list(found.values())


def _rows(engine: Engine, prompt: ExactPrompt) -> _Rows:
    stored = prompt.prompt - 1
    values = [layer for shard in prompt.cache.shards for layer in shard.values]
    errors = low_bit_errors(values, np.arange(stored))
    return _Rows(prompt.prompt, prompt.scores[:stored], errors)


def _high_error(rows: _Rows) -> float:
    errors = high_errors(rows.errors, rows.lengths(BLOCK_SIZE))
    return float(errors[np.isfinite(errors)].max(initial=0.0))


def _candidates(known: Sequence[_Rows], tau_4: float) -> Iterator[_Candidate]:
    """Thresholds between the risks found on the prompts; each once."""
    seen = set()
    for size in BLOCK_SIZES:
        for alpha in ALPHAS if size == BLOCK_SIZE else ALPHAS[:1]:
            risks = np.concatenate([rows.risks(size, alpha) for rows in known])
            if not len(risks):
                continue
            for share_16 in SHARES_16:
                for share_8 in (share for share in SHARES_8 if share >= share_16):
                    tau_high, tau_low = (_threshold(risks, s) for s in (share_16, share_8))
                    policy = PrecisionPolicy(alpha, min(tau_low, tau_high), tau_high, tau_4)
                    candidate = _Candidate(size, policy)
                    if candidate not in seen:
                        seen.add(candidate)
                        yield candidate


def _threshold(risks: npt.NDArray[np.float64], share: float) -> float:
    """The risk that a share of the blocks reaches, to 3 digits; twice the largest for none."""
    if share == 0.0:
        return _rounded_up(2.0 * float(risks.max()))
    return 0.0 if share == 1.0 else float(f"{np.quantile(risks, 1.0 - share):.3g}")


def _rounded_up(figure: float) -> float:
    return float(f"{1.005 * figure:.3g}")


def _store(log: Path | None, engine: Engine) -> JsonLog | None:
    head = {
        "schema": SCHEMA,
        "release": __version__,
        "of": "precision",
        "fingerprint": engine.fingerprint,
    }
    return None if log is None else JsonLog(log, head)


def _measured(
    engine: Engine,
    token_ids: IntArray,
    rows: _Rows,
    candidates: Sequence[_Candidate],
    store: JsonLog | None,
) -> list[tuple[float, float]]:
    """Bytes, relative to 16 bits, and divergence of each candidate on one prompt."""
    wanted = [rows.formats(candidate) for candidate in candidates]
    content = token_ids.tobytes() + b"".join(formats.tobytes() for formats in wanted)
    key = hashlib.blake2b(content, digest_size=16).hexdigest()
    before = dict(store.read(_logged)) if store else {}
    if key in before:
        return before[key]
    lengths = block_lengths(len(rows.errors), BLOCK_SIZE)
    lowered = LoweredPrompt(engine, exact_prompt(engine, token_ids), lengths, _FORMATS[1:])
    known: dict[bytes, tuple[float, float]] = {}
    for formats in wanted:
        if formats.tobytes() not in known:
            known[formats.tobytes()] = lowered.measured(formats)
    found = [known[formats.tobytes()] for formats in wanted]
    if store:
        store.append([{"key": key, "found": found}])
    return found


def _logged(line: Mapping[str, Any]) -> tuple[str, list[tuple[float, float]]]:
    """A key, and what `_measured` found for it, from a line of the log."""
    return line["key"], [(ratio, kl) for ratio, kl in line["found"]]


def _entry(
    candidate: _Candidate, found: Sequence[tuple[float, float]], target: PrecisionTarget
) -> dict[str, Any]:
    kls = [kl for _, kl in found]
    middle, high = quantiles(kls, [0.5, 0.9])
    given = candidate.policy
    return {
        "block_size": candidate.block_size,
        "alpha": given.alpha,
        "tau_low": given.tau_low,
        "tau_high": given.tau_high,
        "tau_4": given.tau_4,
        "payload_ratio": mean(ratio for ratio, _ in found),
        "kl_median": middle,
        "kl_p90": high,
        "kl_mean": mean(kls),
        "meets": middle <= target.median_kl and high <= target.p90_kl,
    }


def _order(entry: dict[str, Any], target: PrecisionTarget) -> tuple[float, ...]:
    """Sorts by bytes what meets the target, and the rest behind it by how far it misses."""
    if entry["meets"]:
        return 0.0, entry["payload_ratio"], entry["kl_mean"]
    misses = entry["kl_median"] / target.median_kl, entry["kl_p90"] / target.p90_kl
    return 1.0, max(misses), entry["payload_ratio"]


def _frontier(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each block size, what no other entry of that size beats in bytes and median divergence."""
    kept = []
    for size in BLOCK_SIZES:
        best = float("inf")
        own = [entry for entry in entries if entry["block_size"] == size]
        for entry in sorted(own, key=lambda e: (e["payload_ratio"], e["kl_median"])):
            if entry["kl_median"] < best:
                best = entry["kl_median"]
                kept.append(entry)
    return kept
