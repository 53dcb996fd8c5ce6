"""The figures of one method on one edited context, by the names that results use.

Quality, against the full prefill of the same new context and against the accepted answers:

- `f1`, `em`: by the data set's own rule.
- `first_token_kl` (nats), `top1_agree`, `exact_continuation` (16 greedy tokens), `same_answer`.
- `stale_answer`: whether the answer from before the edit is given; None where none went stale.
- `answer_margin_recovery`: log-probability of the new answer minus that of the stale one, in the
  recovered state, as a share of the change that a full prefill shows. None where no answer went
  stale, or where the edit hardly moves the full prefill.

Cost; times are medians over the rounds:

- `resume_ttft_ms`, `planning_ms`, `restore_ms`: as in `RecoveryReport`.
- `recompute_ratio`, `repair_ratio`: the same.
- `payload_bytes`: of the source blocks read; `payload_ratio`: to the bytes of the rows restored
  from them in 16 bits. Blocks are read whole, so that it is above the format's own ratio.
- `store_ms`: storing the whole old state at the method's precision, as while a tool runs. Later
  steps of a chain store only what is new, together with other work: None there.
- `precision_planning_ms`, `attention_aggregation_ms`, `attention_profile_overhead`: None. The first
  two happen inside the store, the third inside the prefill; `patchkv bench` measures them alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from patchkv_agents.backends.transformers.adapter import ModelAdapter
from patchkv_agents.profiling.comparison import MethodResult
from patchkv_agents.recovery import RecoveryReport
from patchkv_evals.errors import DataError
from patchkv_evals.metrics import Scorer, same_answer


def quality(
    result: MethodResult, reference: str, answers: Sequence[str], score: Scorer
) -> dict[str, Any]:
    """How good a method's first round was.

    Args:
        result: of the method.
        reference: the full prefill's answer.
        answers: accepted ones.
        score: the data set's.

    Raises:
        DataError: the divergence is infinite.
    """
    if not math.isfinite(result.first_token_kl):
        raise DataError("The first token's divergence from the full prefill is infinite.")
    text = result.reply.text
    return {
        "f1": score.f1(text, answers),
        "em": score.em(text, answers),
        "first_token_kl": result.first_token_kl,
        "top1_agree": result.top1_agree,
        "exact_continuation": result.exact_continuation,
        "same_answer": same_answer(text, reference, score),
    }


def cost(report: RecoveryReport, adapter: ModelAdapter) -> dict[str, Any]:
    """What a method took."""
    rows = sum(report.restored_formats.values())
    return {
        "resume_ttft_ms": report.resume_ttft_ms,
        "planning_ms": report.planning_ms,
        "precision_planning_ms": None,
        "attention_aggregation_ms": None,
        "recompute_ratio": report.recompute_ratio,
        "repair_ratio": report.repair_ratio,
        "payload_bytes": report.payload_bytes,
        "payload_ratio": payload_ratio(report.payload_bytes, rows, adapter),
        "restore_ms": report.restore_ms,
        "attention_profile_overhead": None,
    }


def report_fields(report: RecoveryReport) -> dict[str, Any]:
    """A report as JSON values."""
    return {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in asdict(report).items()
    }


def payload_ratio(payload_bytes: int, rows: int, adapter: ModelAdapter) -> float | None:
    """Bytes read to those of the `rows` restored from them in 16 bits; None without rows."""
    keys_and_values = sum(
        place.kv_heads * (place.key_width + place.value_width) for place in adapter.placements
    )
    return payload_bytes / (2 * rows * keys_and_values) if rows else None
