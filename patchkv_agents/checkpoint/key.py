"""The key of a stored checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointKey:
    """Identifies one checkpoint in a store that engines, tenants and conversations share.

    Attributes:
        fingerprint: of the model that computed the rows (`Engine.fingerprint`).
        tenant: the owner of the data; state is never shared between tenants.
        thread: id of the conversation.
        namespace: part of the thread, such as a subagent; empty for the thread itself.
        version: id of the context version.
    """

    fingerprint: str
    tenant: str
    thread: str
    namespace: str
    version: str
