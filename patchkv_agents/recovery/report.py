"""What a resume did: counts, times and whether its result is exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """Report of one resume. Token counts are disjoint; times are in milliseconds.

    Attributes:
        policy: name of the policy that ran.
        fallback_reason: why an exact prefill took its place, or None.
        is_exact: whether every row is the model's own, computed from exact state only.
        tokens: prompt tokens.
        prefix, new, window, attention, tail, deviation, restored: tokens by label
            (see `RowLabel`).
        cache_read: prompt tokens that were reused exactly.
        recompute_ratio: rows that ran / rows after the exact prefix. Where some layers ran for
            more rows than others, the mean over all layers.
        repair_ratio: recomputed share of the aligned tokens after the first edit.
        resumed_from: id of the version from which state was taken, or None.
        restored_formats: rows that were read from stored payload, exact ones among them, by
            format.
        payload_bytes: bytes of the source blocks that were read.
        ttft_ms: time to first token: from the call to the id of the first output token, as the
            caller's clock sees it. The following parts add up to it.
        render_ms: chat template and tokenizer.
        wait_ms: from the call until the thread took it up, rendering left out; in a stream, also
            until the first piece was asked for.
        history_ms: finding the edits, and committing the version to the history store.
        fetch_ms: carrying out edits that say forget, and asking the engine's store where the thread
            had no state in memory.
        planning_ms: aggregating attention scores, alignment and plan.
        restore_ms: waiting for a suspend under way, allocating, fetching stored rows, moving their
            keys, writing them into the cache.
        recompute_ms: running rows through the model, and waiting for others who use it. On GPUs,
            work may be queued during one of these two and done during the other.
        sampling_ms: choosing the first token.
        resume_ttft_ms: the paper's resume TTFT: `fetch_ms`, `restore_ms`, `recompute_ms` and
            `sampling_ms` together.
        omitted: message index and field of what the chat template does not show (-1 and `tools`
            where it shows no tools).
        notes: what the template was shown in another form than the messages have, in words.
    """

    policy: str
    fallback_reason: str | None
    is_exact: bool
    tokens: int
    prefix: int
    new: int
    window: int
    attention: int
    tail: int
    deviation: int
    restored: int
    cache_read: int
    recompute_ratio: float
    repair_ratio: float
    resumed_from: str | None
    restored_formats: Mapping[str, int]
    payload_bytes: int
    ttft_ms: float
    render_ms: float
    wait_ms: float
    history_ms: float
    fetch_ms: float
    planning_ms: float
    restore_ms: float
    recompute_ms: float
    sampling_ms: float
    resume_ttft_ms: float
    omitted: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def computed(self) -> int:
        """Tokens whose rows ran through the model."""
        return self.tokens - self.prefix - self.restored

    @classmethod
    def of_plan(
        cls, plan: RecoveryPlan, *, policy: str, fallback_reason: str | None, **measured: Any
    ) -> RecoveryReport:
        """The counts of `plan` beside what was `measured` (the remaining fields, by name)."""
        return cls(
            policy=policy,
            fallback_reason=fallback_reason,
            is_exact=plan.is_exact,
            tokens=len(plan.labels),
            prefix=plan.count(RowLabel.PREFIX),
            new=plan.count(RowLabel.NEW),
            window=plan.count(RowLabel.WINDOW),
            attention=plan.count(RowLabel.ATTENTION),
            tail=plan.count(RowLabel.TAIL),
            deviation=plan.count(RowLabel.DEVIATION),
            restored=plan.count(RowLabel.RESTORED),
            cache_read=plan.count(RowLabel.PREFIX),
            recompute_ratio=plan.recompute_ratio,
            repair_ratio=plan.repair_ratio,
            **measured,
        )
