"""The interface of checkpoint stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Executor, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from patchkv_agents.checkpoint.checkpoint import Checkpoint
from patchkv_agents.checkpoint.key import CheckpointKey
from patchkv_agents.errors import CheckpointError
from patchkv_agents.jobs import submitted

Id = TypeVar("Id", str, CheckpointKey)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Statistics of a store and of this handle on it.

    Attributes:
        checkpoints: stored now.
        stored_bytes: of them all, what they share counted once, garbage included.
        hits, misses: loads that gave a checkpoint, and that did not (absent or unusable).
        evictions: checkpoints removed for a budget, a quota or their age.
    """

    checkpoints: int
    stored_bytes: int
    hits: int
    misses: int
    evictions: int


class CheckpointLoad:
    """A checkpoint that is being loaded; its rows arrive layer by layer.

    Args:
        checkpoint: complete but for the bytes of its payloads.
        arrivals: the parts on their way, each with the first layer that it holds, ascending.
        deadline: value of `time.monotonic()` after which the load has failed.
        on_end: called once, with whether everything came into place.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        arrivals: Sequence[tuple[int, Future[None]]] = (),
        deadline: float = 0.0,
        on_end: Callable[[bool], None] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._arrivals = arrivals
        self._next = 0
        self._deadline = deadline
        self._on_end = on_end

    def wait(self, layers: int | None = None) -> None:
        """Block until the first `layers` layers (all if None) of every payload are in place.

        Rows of later layers must not be read before. Call it from one thread at a time.

        Raises:
            CheckpointError: a part is missing, damaged or late. No layer of this load may be
                used then, also none that was in place.
        """
        while self._next < len(self._arrivals):
            first_layer, arrival = self._arrivals[self._next]
            if layers is not None and first_layer >= layers:
                return
            try:
                result_by(arrival, self._deadline)
            except BaseException:
                self.cancel()
                raise
            self._next += 1
        self._end(complete=True)

    def cancel(self) -> None:
        """Cancel the load: parts that have not been requested yet are not fetched."""
        for _, arrival in self._arrivals:
            arrival.cancel()
        self._end(complete=False)

    def _end(self, *, complete: bool) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(complete)


def result_by(future: Future[Result], deadline: float) -> Result:
    """The future's result; `CheckpointError` once `time.monotonic()` is past `deadline`."""
    try:
        return future.result(timeout=max(0.0, deadline - time.monotonic()))
    except CancelledError:
        raise CheckpointError("the load was given up, or its store was closed") from None
    except FutureTimeoutError:
        raise CheckpointError(
            "a stored checkpoint did not arrive in time; raise the store's load_timeout_s if the "
            "store is only slow"
        ) from None


def all_of(pool: Executor, jobs: Iterable[Callable[[], Result]]) -> list[Result]:
    """Results of all jobs, in order; after the first failure no further one starts."""
    futures = [submitted(job, pool) for job in jobs]
    done, pending = wait(futures, return_when=FIRST_EXCEPTION)
    for future in pending:
        future.cancel()
    wait(pending)
    for future in done:
        future.result()
    return [future.result() for future in futures]


class CheckpointStore(Protocol):
    """A store of checkpoints. Thread-safe.

    A checkpoint is complete or absent. Anything that cannot be read, written or verified raises
    `CheckpointError`. No call waits longer than the store's time limits.
    """

    def save(self, key: CheckpointKey, checkpoint: Checkpoint) -> None:
        """Store `checkpoint` under `key`, in place of one that is there.

        Payloads that the store has already are not written again. A save that runs after a
        deletion puts the version back: order them.
        """
        ...

    def load(self, key: CheckpointKey) -> Checkpoint | None:
        """The checkpoint of exactly this key, or None if there is none."""
        ...

    def open(self, key: CheckpointKey) -> CheckpointLoad | None:
        """As `load`, but returns while rows are on their way, first layers first."""
        ...

    def versions(
        self, fingerprint: str | None, tenant: str, thread: str, namespace: str
    ) -> list[CheckpointKey]:
        """The stored versions of a thread, least recently used first.

        Without a fingerprint, the versions of all models. Stores that do not record use are ordered
        by the time of saving.
        """
        ...

    def delete(self, key: CheckpointKey) -> None:
        """Delete a version, and all data of its thread that no remaining version refers to.

        A payload with any row that no remaining version refers to is deleted as a whole, together
        with the versions that share it. Absent keys are no error (and do the same).
        """
        ...

    def delete_thread(self, tenant: str, thread: str) -> None:
        """Delete everything of a thread, for all models and namespaces."""
        ...

    def stats(self) -> StoreStats:
        """Counts and sizes."""
        ...

    def close(self) -> None:
        """Release connections and threads. Persistent checkpoints stay."""
        ...


@dataclass(frozen=True, slots=True)
class UsedRows:
    """Rows `[start, stop)` of a payload of `rows` rows to which a version refers."""

    payload: str
    rows: int
    start: int
    stop: int


def without_dead_rows(versions: Mapping[Id, Iterable[UsedRows]]) -> set[Id]:
    """The versions that can stay when payloads with rows that no version refers to must go.

    A version that goes can leave rows in other payloads without reference, so this repeats until
    nothing changes; the result is the largest such set.
    """
    used = {version: list(rows) for version, rows in versions.items()}
    while True:
        referred: dict[str, np.ndarray] = {}
        for rows in used.values():
            for piece in rows:
                mask = referred.setdefault(piece.payload, np.zeros(piece.rows, dtype=bool))
                mask[piece.start : piece.stop] = True
        dead = {payload for payload, mask in referred.items() if not mask.all()}
        gone = [v for v, rows in used.items() if any(piece.payload in dead for piece in rows)]
        if not gone:
            return set(used)
        for version in gone:
            del used[version]
