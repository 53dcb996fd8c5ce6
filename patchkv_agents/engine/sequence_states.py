"""The states of a KV sequence: where the rows of its current version are."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from patchkv_agents.backends.transformers.adapter import RowCache
from patchkv_agents.backends.transformers.capture import AttentionCapture
from patchkv_agents.checkpoint import Checkpoint
from patchkv_agents.checkpoint.stores.base import CheckpointLoad


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """All rows are in a cache, and some of them stored too.

    Attributes:
        version: name of the current version.
        checkpoint: its tokens; rows that are not stored have no extent.
        cache: holds every row.
        capture: collects attention mass that is not in the checkpoint yet; None once it is.
    """

    version: str
    checkpoint: Checkpoint
    cache: RowCache
    capture: AttentionCapture | None


@dataclass(frozen=True, slots=True, eq=False)
class Leaving:
    """A cache is being stored in the background.

    Attributes:
        version: name of the current version.
        checkpoint: its tokens, with the rows that were stored before.
        stored: becomes its checkpoint, which is among the stored versions then.
    """

    version: str
    checkpoint: Checkpoint
    stored: Future[Checkpoint]


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """All rows that exist are stored.

    Attributes:
        version: name of the current version.
        checkpoint: its rows; None if they are those of the stored version of this name, which may
            be evicted at any time.
    """

    version: str
    checkpoint: Checkpoint | None


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """Rows are arriving from a store beyond this process.

    Attributes:
        version: name of the current version.
        checkpoint: its rows, which may not be in memory yet.
        load: waits for them.
    """

    version: str
    checkpoint: Checkpoint
    load: CheckpointLoad


State = Live | Leaving | Stored | Loading

EMPTY = Stored("", Checkpoint.empty())
"""Of a sequence without state."""
