"""The KV state of one token sequence: live in a cache, stored in checkpoints, or on the way."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future, wait
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch

from patchkv_agents.backends.transformers.adapter import ModelAdapter, RowCache
from patchkv_agents.checkpoint import Checkpoint, CheckpointVersions
from patchkv_agents.checkpoint.offload import offload, packed, store_rows
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.checkpoint.stores.base import CheckpointLoad
from patchkv_agents.engine.background import side_streams
from patchkv_agents.engine.execution import execute
from patchkv_agents.engine.resumed import Resumed
from patchkv_agents.engine.sequence_states import EMPTY, Leaving, Live, Loading, State, Stored
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
LOSSLESS = PrecisionPolicy.lossless()
MAX_ROOM = 1024
"""Most rows that are allocated for an answer in advance; a longer one makes the cache grow."""

Packing = Literal["under_pressure", "now"]
"""When rows are stored with loss: once the memory budget is exceeded, or at each suspend."""


class KVSequence:
    """A growing, editable token sequence and its keys and values.

    It is in one of four states (`sequence_states`):

        Stored --resume--> Live --suspend--> Leaving --(background)--> Stored
        Stored (empty) --adopt--> Loading --resume--> Live

    Every change is all or nothing for the caller: if a resume fails, the live cache is dropped and
    what is stored stays usable.

    Args:
        adapter: of the model.
        rope: of the model.
        versions: where checkpoints of suspended versions are kept.
        worker: offloads in the background, one job at a time; None offloads inside `suspend`.
        storage: the formats in which rows are packed. What is packed with loss is not exact: an
            exact recovery computes it again. So what an exact policy recovered is not packed.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        rope: Rope,
        *,
        versions: CheckpointVersions | None = None,
        worker: Executor | None = None,
        storage: PrecisionPolicy = LOSSLESS,
    ) -> None:
        self._adapter = adapter
        self._rope = rope
        self._versions = CheckpointVersions() if versions is None else versions
        self._worker = worker
        self._state: State = EMPTY
        self._storage = storage
        self._is_exact = True  # by the policy of the last resume
        self._departure: Future[Checkpoint] | None = None  # of a version left for another
        self._troubles: list[str] = []
        self._arriving = threading.Lock()

    @property
    def token_ids(self) -> IntArray:
        """Tokens whose state was computed and is not lost, int64 `[tokens]`."""
        return self._known_checkpoint().token_ids

    @property
    def version(self) -> str:
        """Name of the current version."""
        return self._state.version

    @property
    def checkpoint(self) -> Checkpoint:
        """The current version's checkpoint; rows not yet suspended have no extent."""
        self._settle()
        return self._known_checkpoint()

    @property
    def versions(self) -> CheckpointVersions:
        """The checkpoints of suspended versions."""
        self._settle()
        return self._versions

    @property
    def is_live(self) -> bool:
        """Whether a cache is held."""
        return isinstance(self._state, Live)

    @property
    def live_cache(self) -> RowCache | None:
        """The live cache, or None while suspended. Not to be written."""
        return self._state.cache if isinstance(self._state, Live) else None

    @property
    def is_reused(self) -> bool:
        """Whether it was resumed more than once."""
        return self._versions.is_reused

    @property
    def live_bytes(self) -> int:
        """Bytes of the live cache."""
        cache = self.live_cache
        shards = () if cache is None else cache.shards
        return sum(shard.keys.nbytes + shard.values.nbytes for shard in shards)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored versions, as far as they are stored by now."""
        return self._versions.payload_bytes

    # Storing

    def suspend(self, packing: Packing = "under_pressure") -> Future[Checkpoint] | None:
        """Give up the cache and store every row that is not stored yet.

        The work goes on in the background if there is a worker. What fails there is known at the
        next resume, which then computes the rows that were lost.

        Args:
            packing: when the formats of `storage`, which lose precision, are used:
                `"under_pressure"` stores losslessly and packs what was used longest ago once the
                memory budget is exceeded, `"now"` pins these formats.

        Returns:
            The stored checkpoint to come; None while suspended already.
        """
        state = self._state
        if isinstance(state, Live):
            stored = self._offload(state, packing, repack=True)
            leaving = Leaving(state.version, state.checkpoint, stored)
            self._state = leaving
            # Nobody may ask for this sequence again, and must not keep rows that are evicted.
            stored.add_done_callback(lambda _: self._arrive(leaving))
            return stored
        return state.stored if isinstance(state, Leaving) else None

    def pack(self) -> None:
        """Store with loss what is stored losslessly for as long as there is room."""
        with self._versions.budget.lock:
            self._versions.pack()

    def fork(self, *, storage: PrecisionPolicy | None = None) -> KVSequence:
        """A suspended copy that shares all stored payload. Suspends this sequence first.

        Args:
            storage: the formats in which its further rows are packed; those of this sequence if
                left out.
        """
        self.suspend()
        self._settle()
        copy = KVSequence(
            self._adapter,
            self._rope,
            versions=self._versions.copy(),
            worker=self._worker,
            storage=storage or self._storage,
        )
        copy._state, copy._is_exact = self._state, self._is_exact
        return copy

    def clean_prefix(self, token_ids: IntArray) -> int:
        """See `Checkpoint.clean_prefix`."""
        return self.checkpoint.clean_prefix(token_ids)

    def truncate(self, tokens: int) -> None:
        """Delete all state of the current version behind its first `tokens` tokens.

        The live cache goes too, and rows in front that it alone held are stored losslessly. Other
        versions keep what they have.
        """
        self._settle()
        self._state = Stored(self.version, self._truncated(tokens))

    def copy_prefix(self, token_ids: IntArray) -> KVSequence:
        """A suspended sequence of its own with the state of `clean_prefix(token_ids)`.

        It has nothing of what follows. This sequence stays as it is: rows that only its live cache
        holds are stored losslessly for the copy.
        """
        tokens = self.clean_prefix(token_ids)
        copy = KVSequence(
            self._adapter,
            self._rope,
            versions=self._versions.emptied(),
            worker=self._worker,
            storage=self._storage,
        )
        copy._state = Stored(self.version, self._truncated(tokens))
        return copy

    def clear(self) -> None:
        """Delete all state, of all versions."""
        self._settle()
        self._state = EMPTY
        self._versions.drop(list(self._versions))

    def adopt(self, version: str, load: CheckpointLoad) -> None:
        """Make a checkpoint that is arriving the current version, in place of an empty one.

        Raises:
            CheckpointError: the rows are not those of this model.
        """
        checkpoint = load.checkpoint
        for payload in {extent.payload for extent in checkpoint.extents}:
            heads = self._adapter.kv_heads if self._adapter.is_even else 1  # see `gather`
            if (payload.layers, payload.keys.shape[1]) != (self._adapter.layers, heads):
                raise CheckpointError(
                    f"the stored checkpoint of version {version} has {payload.layers} layers of "
                    f"{payload.keys.shape[1]} heads, and the model {self._adapter.layers} of "
                    f"{heads}: delete it"
                )
        self._state = Loading(version, checkpoint, load)

    # Computing

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
            policy: how much is recomputed, and how rows are packed after the next suspend.
            room: further tokens to allocate the cache for.
            version: name of the new version. A suspended version of this name is replaced at the
                next suspend, all others stay.
            anchors_of: which messages of an earlier version are in this one, as far as known.
            own_of: which rows of other versions it may use beyond a common beginning.
            watch: gets the times of planning, restoring and recomputing.
        """
        watch = watch or Stopwatch()
        self._versions.is_reused |= len(self.token_ids) > 0
        self._settle_stored()
        watch.mark("restore")
        while True:
            donor, plan = self._choose(token_ids, policy, anchors_of, own_of)
            watch.mark("planning")
            try:
                resumed = self._execute(donor, plan, token_ids, policy, room, version, watch)
            except CheckpointError as error:
                if not isinstance(self._state, Loading):
                    raise
                self._give_up_loading(error)  # what was arriving from a store did not
                watch.mark("restore")
                continue
            except BaseException:
                self._drop_cache()
                raise
            self._is_exact = policy.method.is_exact
            return resumed

    def append(self, token_id: int) -> torch.Tensor:
        """Compute the state of one more token; returns the next logits, `[vocab]`."""
        state = self._state
        if not isinstance(state, Live):
            raise RuntimeError("resume the sequence before appending to it")
        old = state.checkpoint
        position = len(old)
        token_ids = np.append(old.token_ids, np.int64(token_id))
        state.cache.reserve(position + 1)
        if state.capture is not None:
            state.capture.announce(position, position + 1)
        rows = RowSet.of_range(position, position + 1)
        logits = self._adapter.forward_rows(token_ids, rows, state.cache, capture=state.capture)
        exact = not old.origins.any()
        grown = replace(
            old,
            token_ids=token_ids,
            origins=np.append(old.origins, np.int16(0 if exact else 1)),
            scores=np.append(old.scores, np.float32(0.0)),
            block_map=old.block_map and old.block_map.grown(position + 1),
        )
        self._state = replace(state, checkpoint=grown)
        return logits

    def rewind(self, tokens: int) -> None:
        """Drop the rows behind the first `tokens` tokens of a live sequence, as before `append`.

        What is appended next takes their places. Scores stay as collected so far; no more are.
        """
        if not isinstance(self._state, Live) or not 0 < tokens <= len(self.token_ids):
            raise RuntimeError("only a live sequence is rewound, and to some of its tokens")
        state = self._scored(self._state)
        old = state.checkpoint
        rewound = Checkpoint(
            token_ids=old.token_ids[:tokens],
            origins=old.origins[:tokens],
            scores=old.scores[:tokens],
            extents=old.stored_at(np.arange(tokens)),
            block_map=old.block_map and old.block_map.truncated(tokens),
        )
        state.cache.filled = tokens
        self._state = replace(state, checkpoint=rewound)

    # Parts of a resume

    def _choose(
        self, token_ids: IntArray, policy: RecoveryPolicy, anchors_of: AnchorsOf, own_of: OwnOf
    ) -> tuple[Donor, RecoveryPlan]:
        """The state to recover from, and the plan."""
        if isinstance(self._state, Live):
            self._state = self._scored(self._state)
        checkpoint = self._known_checkpoint()
        current = Donor(
            self.version,
            checkpoint,
            is_live=self.is_live,
            own=own_of(self.version, len(checkpoint)),
        )
        donors = []
        for bound, version in self._versions.ranked(token_ids, exact=policy.method.is_exact):
            other = self._versions.get(version)
            if other is not None and other is not checkpoint:
                donor = Donor(version, other, own=own_of(version, len(other)))
                if donor.own is not None:
                    bound = min(bound, int(np.count_nonzero(donor.usable(token_ids))))
                donors.append((bound, donor))
        donors.sort(key=lambda entry: -entry[0])
        return choose_donor(current, donors, token_ids, policy, anchors_of)

    def _execute(
        self,
        donor: Donor,
        plan: RecoveryPlan,
        token_ids: IntArray,
        policy: RecoveryPolicy,
        room: int,
        version: str,
        watch: Stopwatch,
    ) -> Resumed:
        """Carry out a plan; the sequence is live then."""
        self._versions.touch(donor.version)
        if donor.version != self.version or donor.checkpoint is not self._known_checkpoint():
            self._leave_for(donor)
        state, tokens = self._state, len(token_ids)
        source = plan.source
        capacity = -(-(tokens + min(room, MAX_ROOM)) // CAPACITY_STEP) * CAPACITY_STEP
        old = donor.checkpoint
        if isinstance(state, Live):
            source[source == np.arange(tokens)] = -1  # in place already
            old = self._store_moving_rows(state, source)
            cache = state.cache
            cache.resize(capacity)
        else:
            cache = self._adapter.new_cache(capacity)
        load = state.load if isinstance(state, Loading) else None
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
            self._versions.put(state.version, old, repack=False)  # to go back to
        cache.filled = tokens
        checkpoint = Checkpoint(
            token_ids=token_ids.copy(),
            origins=done.plan.origins(old.origins),
            scores=np.zeros(tokens, dtype=np.float32),
            extents=old.stored_at(done.plan.source),
        )
        self._state = Live(version, checkpoint, cache, done.capture)
        trouble, self._troubles = "; ".join(self._troubles) or None, []
        return Resumed(
            logits=done.logits,
            plan=done.plan,
            resumed_from=state.version if done.plan.kept.any() else None,
            trouble=trouble,
            restored_formats=done.restoration.formats,
            payload_bytes=done.restoration.payload_bytes,
        )

    def _leave_for(self, donor: Donor) -> None:
        """Make a stored version the current one; what is live is stored meanwhile."""
        if isinstance(self._state, Live):
            # Not repacked: the donor's payload would be copied away from under it.
            self._departure = self._offload(self._state, "under_pressure", repack=False)
        elif isinstance(self._state, Loading):
            self._state.load.cancel()
        self._state = Stored(donor.version, donor.checkpoint)

    def _store_moving_rows(self, state: Live, source: IntArray) -> Checkpoint:
        """Store the rows that are wanted elsewhere, before anything overwrites them."""
        old = state.checkpoint
        moving = np.zeros(len(old), dtype=bool)
        moving[source[source >= 0]] = True
        extents = store_rows(state.cache.shards, moving & ~old.stored, self._rope)
        old = old.with_extents((*old.extents, *extents))
        self._state = replace(state, checkpoint=old)
        return old

    # Changes of state

    def _known_checkpoint(self) -> Checkpoint:
        """The current version's checkpoint as it is now, without waiting."""
        checkpoint = self._state.checkpoint
        if checkpoint is None:
            checkpoint = self._versions.get(self.version)
        return Checkpoint.empty() if checkpoint is None else checkpoint

    def _scored(self, state: Live) -> Live:
        """The state with what its capture has collected: scores, and the block map."""
        if state.capture is None:
            return state
        tokens = len(state.checkpoint)
        scored = replace(
            state.checkpoint,
            scores=state.capture.scores(tokens),
            block_map=state.capture.block_map(tokens),
        )
        return replace(state, checkpoint=scored, capture=None)

    def _truncated(self, tokens: int) -> Checkpoint:
        """The checkpoint's first `tokens` tokens, with the rows that the live cache alone holds."""
        whole = self._known_checkpoint()
        checkpoint = whole.truncated(tokens)
        if not isinstance(self._state, Live):
            return checkpoint
        extents = store_rows(self._state.cache.shards, ~whole.stored[:tokens], self._rope)
        return checkpoint.with_extents((*checkpoint.extents, *extents))

    def _offload(self, state: Live, packing: Packing, *, repack: bool) -> Future[Checkpoint]:
        """Begin to store a live cache as a version."""
        state = self._scored(state)
        lossless = self._is_exact or self._storage.is_lossless
        precision = None if lossless else self._storage
        streams = side_streams(self._adapter.cache_devices)
        lossless_bytes = int(np.count_nonzero(~state.checkpoint.stored)) * self._adapter.row_bytes
        if packing == "under_pressure" and lossless_bytes > self._versions.budget.limit_bytes:
            packing = "now"
        pack = None
        if precision is not None and packing == "under_pressure":
            pack = partial(packed, rope=self._rope, precision=precision)

        def job() -> Checkpoint:
            with streams:
                stored = offload(
                    state.checkpoint,
                    state.cache.shards,
                    rope=self._rope,
                    precision=precision if packing == "now" else None,
                )
            return self._versions.put(state.version, stored, repack=repack, pack=pack)

        return submitted(job, self._worker)

    def _drop_cache(self) -> None:
        """After a failure: what is stored stays, if all of it has arrived."""
        state = self._state
        if isinstance(state, Live):
            self._state = Stored(state.version, state.checkpoint)
        elif isinstance(state, Loading):  # some rows may not be in memory, and may never be
            state.load.cancel()
            self._state = EMPTY

    def _give_up_loading(self, error: CheckpointError) -> None:
        self._drop_cache()
        self._troubles.append(f"stored state could not be read: {error}")

    def _settle(self) -> None:
        """Wait for what is being stored and what is arriving. Rows that are lost are given up."""
        self._settle_stored()
        if isinstance(self._state, Loading):
            state = self._state
            try:
                state.load.wait()
                self._state = Stored(state.version, state.checkpoint)
            except CheckpointError as error:
                self._give_up_loading(error)

    def _settle_stored(self) -> None:
        """Wait for what is being stored."""
        departure, self._departure = self._departure, None
        if departure is not None:
            error = departure.exception()
            if error is not None:
                self._note_lost(error)
        state = self._state
        if isinstance(state, Leaving):
            wait([state.stored])
            self._arrive(state)

    def _arrive(self, leaving: State) -> None:
        """The rows of a suspended sequence are stored, or lost. In any Python thread."""
        with self._arriving:
            if self._state is leaving and isinstance(leaving, Leaving):
                error = leaving.stored.exception()
                if error is not None:
                    self._note_lost(error)
                self._state = Stored(leaving.version, leaving.checkpoint if error else None)

    def _note_lost(self, error: BaseException) -> None:
        self._troubles.append(f"suspended state could not be stored: {error}")
