"""What a stored checkpoint is called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointKey:
    """Names one checkpoint among all engines, users and conversations that share a store.

    Attributes:
        fingerprint: of the model that computed the rows (`Engine.fingerprint`).
        tenant: whose data it is; one tenant's state never answers another's.
        thread: id of the conversation.
        namespace: part of the thread, such as a subagent; empty for the thread itself.
        version: id of the context version.
    """

    fingerprint: str
    tenant: str
    thread: str
    namespace: str
    version: str
