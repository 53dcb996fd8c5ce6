"""The KV state of one token sequence: live in a cache, stored in a checkpoint, or partly both."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from patchkv_agents.alignment import align
from patchkv_agents.checkpoint import Checkpoint, store_rows
from patchkv_agents.engine.adapter import ModelAdapter, RowCache
from patchkv_agents.engine.capture import PROMPT_QUERIES, AttentionCapture, sampled_layers
from patchkv_agents.ranges import BoolArray, IntArray, RowSet
from patchkv_agents.recovery.plan import RecoveryPlan, plan_recovery
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.restore import restore_rows
from patchkv_agents.recovery.rope import Rope

CAPACITY_STEP = 256
"""Caches are allocated in multiples of this many rows."""
MAX_ROOM = 1024
"""Most rows that are allocated for an answer in advance; a longer one makes the cache grow."""


def _milliseconds_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3


@dataclass(frozen=True, slots=True, eq=False)
class Resumed:
    """Outcome of one resume.

    Attributes:
        logits: of the last token, `[vocab]`.
        plan: what was kept, restored and computed.
        payload_bytes: bytes of the source blocks that were read.
        planning_ms, restore_ms, recompute_ms: alignment and plan; stored rows into the cache; rows
            through the model.
        recovery_ms: everything after planning.
    """

    logits: torch.Tensor
    plan: RecoveryPlan
    payload_bytes: int
    planning_ms: float
    restore_ms: float
    recompute_ms: float
    recovery_ms: float


class KVSequence:
    """A growing, editable token sequence and its keys and values.

    Every change of state is all or nothing for the caller: if a resume fails, the live cache is
    dropped and what the checkpoint holds stays usable.
    """

    def __init__(self, adapter: ModelAdapter, rope: Rope) -> None:
        self._adapter = adapter
        self._rope = rope
        self._checkpoint = Checkpoint.empty()
        self._cache: RowCache | None = None
        self._capture: AttentionCapture | None = None

    @property
    def token_ids(self) -> IntArray:
        """Tokens whose state was computed, int64 `[tokens]`."""
        return self._checkpoint.token_ids

    @property
    def checkpoint(self) -> Checkpoint:
        """The current version's checkpoint; rows not yet suspended have no extent."""
        return self._checkpoint

    @property
    def is_live(self) -> bool:
        """Whether a cache is held."""
        return self._cache is not None

    @property
    def live_cache(self) -> RowCache | None:
        """The live cache, or None while suspended. Not to be written."""
        return self._cache

    def fork(self) -> KVSequence:
        """A suspended copy that shares all stored payload. Suspends this sequence first."""
        self.suspend()
        copy = KVSequence(self._adapter, self._rope)
        copy._checkpoint = self._checkpoint
        return copy

    def suspend(self) -> int:
        """Store every row that is not stored yet and drop the cache.

        Returns:
            Bytes that were copied.
        """
        if self._cache is None:
            return 0
        before = self._checkpoint.payload_bytes
        self._settle_scores()
        self._store(RowSet.of_mask(~self._checkpoint.stored))
        self._cache = None
        return self._checkpoint.payload_bytes - before

    def truncate(self, tokens: int) -> None:
        """Delete all state behind the first `tokens` tokens, the live cache included."""
        self.suspend()
        self._checkpoint = self._checkpoint.truncated(tokens)

    def resume(self, token_ids: IntArray, policy: RecoveryPolicy, *, room: int = 0) -> Resumed:
        """Make `token_ids` the current sequence, recovering what the old state allows.

        Args:
            token_ids: int64 `[tokens]`, at least one.
            policy: how much is recomputed.
            room: further tokens to allocate the cache for.
        """
        started = time.perf_counter()
        self._settle_scores()
        old = self._checkpoint
        live = self._cache is not None
        available = np.ones(len(old), dtype=bool) if live else old.stored
        plan = plan_recovery(
            align(old.token_ids, token_ids),
            policy,
            origins=old.origins,
            available=available,
            scores=old.scores,
        )
        planning_ms = _milliseconds_since(started)
        try:
            return self._execute(token_ids, plan, room, planning_ms)
        except BaseException:
            self._cache, self._capture = None, None
            raise

    def _execute(
        self, token_ids: IntArray, plan: RecoveryPlan, room: int, planning_ms: float
    ) -> Resumed:
        tokens = len(token_ids)
        begun = time.perf_counter()
        in_place = np.zeros(tokens, dtype=bool)
        if self._cache is not None:
            in_place = plan.source == np.arange(tokens)
            self._store_moving_rows(plan, in_place)
        capacity = -(-(tokens + min(room, MAX_ROOM)) // CAPACITY_STEP) * CAPACITY_STEP
        cache = self._cache
        if cache is None:
            cache = self._adapter.new_cache(capacity)
        cache.resize(capacity)
        self._cache = cache
        old = self._checkpoint
        payload_bytes = restore_rows(
            old.stored_at(np.where(in_place, -1, plan.source)), cache.keys, cache.values, self._rope
        )
        restore_ms = _milliseconds_since(begun)

        started = time.perf_counter()
        capture = AttentionCapture(
            layers=sampled_layers(self._adapter.layers),
            prior=np.where(plan.aligned >= 0, old.scores[plan.aligned], 0.0) if len(old) else None,
            device=self._adapter.device,
        )
        capture.announce(max(0, tokens - PROMPT_QUERIES), tokens)
        logits = self._adapter.forward_rows(token_ids, plan.rows, cache, capture=capture)
        cache.filled = tokens
        recompute_ms = _milliseconds_since(started)

        self._capture = capture
        self._checkpoint = Checkpoint(
            token_ids=token_ids.copy(),
            origins=plan.origins(old.origins),
            scores=np.zeros(tokens, dtype=np.float32),
            extents=old.stored_at(plan.source),
        )
        return Resumed(
            logits=logits,
            plan=plan,
            payload_bytes=payload_bytes,
            planning_ms=planning_ms,
            restore_ms=restore_ms,
            recompute_ms=recompute_ms,
            recovery_ms=_milliseconds_since(begun),
        )

    def append(self, token_id: int) -> torch.Tensor:
        """Compute the state of one more token; returns the next logits, `[vocab]`."""
        if self._cache is None:
            raise RuntimeError("resume the sequence before appending to it")
        old = self._checkpoint
        position = len(old)
        token_ids = np.append(old.token_ids, np.int64(token_id))
        self._cache.reserve(position + 1)
        if self._capture is not None:
            self._capture.announce(position, position + 1)
        rows = RowSet.of_range(position, position + 1)
        logits = self._adapter.forward_rows(token_ids, rows, self._cache, capture=self._capture)
        exact = not old.origins.any()
        self._checkpoint = replace(
            old,
            token_ids=token_ids,
            origins=np.append(old.origins, np.int16(0 if exact else 1)),
            scores=np.append(old.scores, np.float32(0.0)),
        )
        return logits

    def _settle_scores(self) -> None:
        """Move what the capture has collected into the checkpoint."""
        if self._capture is not None:
            scores = self._capture.scores(len(self._checkpoint))
            self._checkpoint = replace(self._checkpoint, scores=scores)
            self._capture = None

    def _store(self, rows: RowSet) -> None:
        if self._cache is not None:
            extents = store_rows(self._cache.keys, self._cache.values, rows)
            self._checkpoint = self._checkpoint.with_stored(extents)

    def _store_moving_rows(self, plan: RecoveryPlan, in_place: BoolArray) -> None:
        """Store the rows that the plan keeps but moves, before anything overwrites them."""
        moving = np.zeros(len(self._checkpoint), dtype=bool)
        moving[plan.source[plan.kept & ~in_place]] = True
        self._store(RowSet.of_mask(moving & ~self._checkpoint.stored))
