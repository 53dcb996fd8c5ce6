"""The KV state of one token sequence: live in a cache, stored in checkpoints, or partly both."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import replace

import numpy as np
import torch

from patchkv_agents.backends.transformers.adapter import ModelAdapter, RowCache
from patchkv_agents.backends.transformers.capture import AttentionCapture
from patchkv_agents.checkpoint import Checkpoint, CheckpointVersions
from patchkv_agents.checkpoint.offload import offload, store_rows
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.checkpoint.stores.base import CheckpointLoad
from patchkv_agents.engine.background import side_streams
from patchkv_agents.engine.execution import execute
from patchkv_agents.engine.resumed import Resumed
from patchkv_agents.engine.stopwatch import Stopwatch
from patchkv_agents.errors import CheckpointError
from patchkv_agents.jobs import submitted
from patchkv_agents.ranges import IntArray, RowSet
from patchkv_agents.recovery.donors import (
    AnchorsOf,
    Donor,
    OwnOf,
    all_own,
    choose_donor,
    no_anchors,
)
from patchkv_agents.recovery.plan import RecoveryPlan
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_kernels import Rope

CAPACITY_STEP = 256
"""Caches are allocated in multiples of this many rows."""
MAX_ROOM = 1024
"""Most rows that are allocated for an answer in advance; a longer one makes the cache grow."""


class KVSequence:
    """A growing, editable token sequence and its keys and values.

    Every change of state is all or nothing for the caller: if a resume fails, the live cache is
    dropped and what the checkpoint holds stays usable.

    Args:
        adapter: of the model.
        rope: of the model.
        versions: where checkpoints of suspended versions are kept.
        worker: offloads in the background, one job at a time; None offloads inside `suspend`.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        rope: Rope,
        *,
        versions: CheckpointVersions | None = None,
        worker: Executor | None = None,
    ) -> None:
        self._adapter = adapter
        self._rope = rope
        self._versions = CheckpointVersions() if versions is None else versions
        self._worker = worker
        self._version = ""
        self._checkpoint = Checkpoint.empty()
        self._cache: RowCache | None = None
        self._capture: AttentionCapture | None = None
        self._precision: PrecisionPolicy | None = None
        self._suspending: Future[Checkpoint] | None = None  # becomes the checkpoint
        self._leaving: Future[Checkpoint] | None = None  # is of another version by now
        self._load: CheckpointLoad | None = None  # by which the checkpoint is arriving
        self._trouble: list[str] = []

    @property
    def token_ids(self) -> IntArray:
        """Tokens whose state was computed, int64 `[tokens]`."""
        return self._checkpoint.token_ids

    @property
    def version(self) -> str:
        """Name of the current version."""
        return self._version

    @property
    def checkpoint(self) -> Checkpoint:
        """The current version's checkpoint; rows not yet suspended have no extent."""
        self._settle()
        return self._checkpoint

    @property
    def versions(self) -> CheckpointVersions:
        """The checkpoints of suspended versions."""
        self._settle()
        return self._versions

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
        copy = KVSequence(
            self._adapter, self._rope, versions=self.versions.copy(), worker=self._worker
        )
        copy._checkpoint, copy._version = self._checkpoint, self._version
        copy._precision = self._precision
        return copy

    def suspend(self) -> Future[Checkpoint] | None:
        """Give up the cache and store every row that is not stored yet.

        The work goes on in the background if there is a worker. What fails there is known at the
        next resume, which then computes the rows that were lost.

        Returns:
            The stored checkpoint to come; None while suspended already.
        """
        if self._cache is not None:
            self._suspending = self._offload(repack=True)
        return self._suspending

    def clean_prefix(self, token_ids: IntArray) -> int:
        """See `Checkpoint.clean_prefix`."""
        self._settle()
        return self._checkpoint.clean_prefix(token_ids)

    def truncate(self, tokens: int) -> None:
        """Delete all state of the current version behind its first `tokens` tokens.

        The live cache goes too, and rows in front that it alone held are stored losslessly. Other
        versions keep what they have.
        """
        self._settle()
        self._checkpoint = self._truncated(tokens)
        self._cache, self._capture = None, None

    def copy_prefix(self, token_ids: IntArray) -> KVSequence:
        """A suspended sequence of its own with the state of `clean_prefix(token_ids)`.

        It has nothing of what follows. This sequence stays as it is: rows that only its live cache
        holds are stored losslessly for the copy.
        """
        tokens = self.clean_prefix(token_ids)
        copy = KVSequence(
            self._adapter, self._rope, versions=self._versions.emptied(), worker=self._worker
        )
        copy._checkpoint, copy._version = self._truncated(tokens), self._version
        return copy

    def _truncated(self, tokens: int) -> Checkpoint:
        """The checkpoint's first `tokens` tokens, with the rows that the live cache alone holds."""
        checkpoint = self._checkpoint.truncated(tokens)
        if self._cache is None:
            return checkpoint
        unstored = ~self._checkpoint.stored[:tokens]
        extents = store_rows(self._cache.shards, unstored, self._rope)
        return checkpoint.with_extents((*checkpoint.extents, *extents))

    def clear(self) -> None:
        """Delete all state, of all versions."""
        self._settle()
        self._cache, self._capture, self._checkpoint = None, None, Checkpoint.empty()
        self._versions.drop(list(self._versions))

    def adopt(self, version: str, load: CheckpointLoad) -> None:
        """Make a checkpoint that is arriving the current version, in place of an empty one.

        Raises:
            CheckpointError: the rows are not those of this model.
        """
        checkpoint = load.checkpoint
        for payload in {extent.payload for extent in checkpoint.extents}:
            if (payload.layers, payload.keys.shape[1]) != (
                self._adapter.layers,
                self._adapter.kv_heads,
            ):
                raise CheckpointError(
                    f"the stored checkpoint of version {version} has {payload.layers} layers of "
                    f"{payload.keys.shape[1]} heads, and the model {self._adapter.layers} of "
                    f"{self._adapter.kv_heads}: delete it"
                )
        self._version, self._checkpoint, self._load = version, checkpoint, load

    def resume(
        self,
        token_ids: IntArray,
        policy: RecoveryPolicy,
        *,
        room: int = 0,
        version: str = "",
        anchors_of: AnchorsOf = no_anchors,
        own_of: OwnOf = all_own,
        watch: Stopwatch | None = None,
    ) -> Resumed:
        """Make `token_ids` the current sequence, recovering what stored and live state allow.

        Args:
            token_ids: int64 `[tokens]`, at least one.
            policy: how much is recomputed, and how rows are stored when the sequence is suspended.
            room: further tokens to allocate the cache for.
            version: name of the new version. A suspended version of this name is replaced at the
                next suspend, all others stay.
            anchors_of: which messages of an earlier version are in this one, as far as known.
            own_of: which rows of other versions it may use beyond a common beginning.
            watch: gets the times of planning, restoring and recomputing.
        """
        watch = watch or Stopwatch()
        self._settle_stored()
        watch.mark("restore")
        try:
            resumed = self._resume(token_ids, policy, room, anchors_of, own_of, watch)
        except CheckpointError as error:  # the current version was still arriving from a store
            self._give_up_load(error)
            watch.mark("restore")
            resumed = self._resume(token_ids, policy, room, anchors_of, own_of, watch)
        self._version, self._precision = version, policy.precision
        return resumed

    def _resume(
        self,
        token_ids: IntArray,
        policy: RecoveryPolicy,
        room: int,
        anchors_of: AnchorsOf,
        own_of: OwnOf,
        watch: Stopwatch,
    ) -> Resumed:
        self._settle_scores()
        current = Donor(
            self._version,
            self._checkpoint,
            is_live=self._cache is not None,
            own=own_of(self._version, len(self._checkpoint)),
        )
        others = self._other_donors(token_ids, policy, own_of)
        donor, plan = choose_donor(current, others, token_ids, policy, anchors_of)
        watch.mark("planning")
        try:
            if donor is not current:
                self._leave_for(donor)
            return self._execute(token_ids, plan, policy, room, watch)
        except BaseException:
            self._cache, self._capture = None, None
            if self._load is not None:  # some rows may not be in memory, and may never be
                self._load.cancel()
                self._checkpoint = Checkpoint.empty()
            raise
        finally:
            self._load = None

    def _other_donors(
        self, token_ids: IntArray, policy: RecoveryPolicy, own_of: OwnOf
    ) -> list[tuple[int, Donor]]:
        """The stored versions with what each can save at most, largest first."""
        donors = []
        for bound, version in self._versions.ranked(token_ids, exact=policy.is_exact):
            checkpoint = self._versions.get(version)
            if checkpoint is not self._checkpoint:
                donor = Donor(version, checkpoint, own=own_of(version, len(checkpoint)))
                if donor.own is not None:
                    bound = min(bound, int(np.count_nonzero(donor.usable(token_ids))))
                donors.append((bound, donor))
        return sorted(donors, key=lambda entry: -entry[0])

    def _leave_for(self, donor: Donor) -> None:
        """Make a stored version the current one; what is live is stored meanwhile."""
        self._versions.touch(donor.version)
        if self._cache is not None:
            # Not repacked: the donor's payload would be copied away from under it.
            self._leaving = self._offload(repack=False)
        self._version, self._checkpoint = donor.version, donor.checkpoint

    def _execute(
        self,
        token_ids: IntArray,
        plan: RecoveryPlan,
        policy: RecoveryPolicy,
        room: int,
        watch: Stopwatch,
    ) -> Resumed:
        tokens = len(token_ids)
        source = plan.source
        if self._cache is not None:
            source[source == np.arange(tokens)] = -1  # in place already
            self._store_moving_rows(source)
        capacity = -(-(tokens + min(room, MAX_ROOM)) // CAPACITY_STEP) * CAPACITY_STEP
        cache = self._cache
        if cache is None:
            cache = self._adapter.new_cache(capacity)
        cache.resize(capacity)
        self._cache = cache
        old, load = self._checkpoint, self._load
        done = execute(
            self._adapter,
            self._rope,
            token_ids,
            plan,
            policy,
            cache,
            old=old,
            source=source,
            arrived=None if load is None else load.wait,
            watch=watch,
        )
        if load is not None:
            load.wait()  # what was not needed now will be referred to all the same
            self._versions.put(self._version, old, repack=False)  # to go back to
        cache.filled = tokens

        self._capture = done.capture
        self._checkpoint = Checkpoint(
            token_ids=token_ids.copy(),
            origins=done.plan.origins(old.origins),
            scores=np.zeros(tokens, dtype=np.float32),
            extents=old.stored_at(done.plan.source),
        )
        trouble, self._trouble = "; ".join(self._trouble) or None, []
        return Resumed(
            logits=done.logits,
            plan=done.plan,
            resumed_from=self._version if done.plan.kept.any() else None,
            trouble=trouble,
            restored_formats=done.restoration.formats,
            payload_bytes=done.restoration.payload_bytes,
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
            block_map=old.block_map and old.block_map.grown(position + 1),
        )
        return logits

    def rewind(self, tokens: int) -> None:
        """Forget the rows behind the first `tokens` tokens of a live sequence, as before `append`.

        What is appended next takes their places. Scores stay as collected so far; no more are.
        """
        if self._cache is None or not 0 < tokens <= len(self._checkpoint):
            raise RuntimeError("only a live sequence is rewound, and to some of its tokens")
        self._settle_scores()
        old = self._checkpoint
        self._checkpoint = Checkpoint(
            token_ids=old.token_ids[:tokens],
            origins=old.origins[:tokens],
            scores=old.scores[:tokens],
            extents=old.stored_at(np.arange(tokens)),
            block_map=old.block_map and old.block_map.truncated(tokens),
        )
        self._cache.filled = tokens

    def _settle_scores(self) -> None:
        """Move what the capture has collected into the checkpoint: scores, and the block map."""
        if self._capture is not None:
            tokens = len(self._checkpoint)
            self._checkpoint = replace(
                self._checkpoint,
                scores=self._capture.scores(tokens),
                block_map=self._capture.block_map(tokens),
            )
            self._capture = None

    def _offload(self, *, repack: bool) -> Future[Checkpoint]:
        """Hand the live cache over to be stored as the current version."""
        self._settle_scores()
        cache, checkpoint, version = self._cache, self._checkpoint, self._version
        precision, streams = self._precision, side_streams(self._adapter.cache_devices)
        if cache is None:
            raise RuntimeError("there is no cache to offload")

        def job() -> Checkpoint:
            with streams:
                stored = offload(checkpoint, cache.shards, rope=self._rope, precision=precision)
            return self._versions.put(version, stored, repack=repack)

        self._cache = None
        return submitted(job, self._worker)

    def _settle(self) -> None:
        """Wait for what is being stored and what is arriving. Rows that are lost are given up."""
        self._settle_stored()
        if self._load is not None:
            try:
                self._load.wait()
            except CheckpointError as error:
                self._give_up_load(error)
            self._load = None

    def _give_up_load(self, error: CheckpointError) -> None:
        self._checkpoint = Checkpoint.empty()
        self._trouble.append(f"stored state could not be read: {error}")

    def _settle_stored(self) -> None:
        """Wait for what is being stored."""
        for stored in (self._leaving, self._suspending):
            try:
                if stored is not None:
                    checkpoint = stored.result()
                    if stored is self._suspending:
                        self._checkpoint = checkpoint
            except Exception as error:  # whatever it was: it must not lose the call
                self._trouble.append(f"suspended state could not be stored: {error}")
        self._leaving = self._suspending = None

    def _store_moving_rows(self, source: IntArray) -> None:
        """Store the rows that are wanted elsewhere, before anything overwrites them."""
        if self._cache is None:
            return
        old = self._checkpoint
        moving = np.zeros(len(old), dtype=bool)
        moving[source[source >= 0]] = True
        extents = store_rows(self._cache.shards, moving & ~old.stored, self._rope)
        self._checkpoint = old.with_extents((*old.extents, *extents))
