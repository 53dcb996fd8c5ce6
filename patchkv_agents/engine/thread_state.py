"""What a thread remembers of its versions, and what forgetting and storing do with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from patchkv_agents.context import (
    ContextHistory,
    ContextVersion,
    SampledReply,
    ThreadKey,
    match_messages,
    match_replies,
    message_anchors,
)
from patchkv_agents.engine.forgetting import ForgettingLine, ancestry, came_after
from patchkv_agents.errors import CheckpointError
from patchkv_agents.ranges import IntArray
from patchkv_agents.recovery.donors import Anchors

if TYPE_CHECKING:
    from patchkv_agents.engine.persistence import StoredThread
    from patchkv_agents.engine.sequence import KVSequence

Spans = tuple[tuple[int, int], ...]
"""Token span of each message."""

MOST_REPLIES = 256
"""Answers whose sampled ids are kept; those of older ones are encoded anew."""
MOST_SPANS = 32
"""Versions of which the messages' places are kept, to align others with them."""

ClearForks = Callable[[Collection[ThreadKey], str], None]
"""Deletes the state of the threads of these histories, for the forgetting version of this id."""


class ThreadState:
    """All that an edit marked `forget` may have to take from a thread, and its history.

    Args:
        history: of the thread.
        sequence: its tokens and KV state.
        stored: its checkpoints in the engine's store, if there is one.

    Attributes:
        history, sequence: the same.
        replies: sampled ids of its answers, the newest last.
        must_clear: everything goes at the next call: a fork forgot what this thread has seen.
    """

    def __init__(
        self, history: ContextHistory, sequence: KVSequence, stored: StoredThread | None
    ) -> None:
        self.history = history
        self.sequence = sequence
        self.replies: deque[SampledReply] = deque(maxlen=MOST_REPLIES)
        self.must_clear = False
        self._stored = stored
        self._spans: dict[str, Spans] = {}  # by version
        self._forgotten: str | None = None  # id of the last forgetting version that was obeyed
        self._forgetting_line = ForgettingLine()

    def take_over(self, other: ThreadState, sequence: KVSequence) -> None:
        """Become a fork of another state, with this copy of its sequence."""
        self.sequence, self._forgotten = sequence, other._forgotten
        self.replies, self._spans = other.replies.copy(), dict(other._spans)

    def suspend(self) -> None:
        """Store the KV state in CPU memory and, if there is a store, save it there."""
        if self.must_clear:
            self.clear()
        is_live = self.sequence.is_live
        checkpoint = self.sequence.suspend()
        if is_live and checkpoint is not None and self._stored is not None:
            self._stored.save(self.sequence.version, checkpoint)

    def clear(self) -> None:
        """Delete all KV state and sampled ids, in memory and in the store."""
        self.sequence.clear()
        if self._stored is not None:
            self._stored.forget(lambda version: True, sweep=True)
        self.replies.clear()
        self.must_clear = False

    def anchors(self, version: ContextVersion, spans: Spans, old: str) -> Anchors:
        """Where the messages that `version` shares with an old one stand in both."""
        if old not in self._spans:
            return ()
        matching = match_messages(self.history.get(old).messages, version.messages)
        return message_anchors(self._spans[old], spans, matching)

    def note_spans(self, version: ContextVersion, spans: Spans) -> None:
        """Keep the places of a version's messages, to align later ones with it."""
        self._spans[version.id] = spans
        if len(self._spans) > MOST_SPANS:
            del self._spans[next(iter(self._spans))]

    def forget(
        self, version: ContextVersion, token_ids: IntArray, clear_forks: ClearForks
    ) -> list[str]:
        """Delete all state that saw what an edit up to `version` says to forget.

        Args:
            version: about to be answered.
            token_ids: its tokens; rows for the first of them that saw nothing stay.
            clear_forks: called where other threads saw the same.

        Returns:
            Reasons for the report.
        """
        reasons = []
        try:
            if self.must_clear:
                self.clear()
            forgetting = self._forgetting_line.newest(self.history, version)
            if forgetting is not None and forgetting.id != self._forgotten:
                reasons += self._forget_before(forgetting, version, token_ids, clear_forks)
                self._forgotten = forgetting.id
        except CheckpointError as error:  # tried again at the next call
            reasons.append(f"stored state that saw forgotten text is not deleted yet: {error}")
        return reasons

    def _forget_before(
        self,
        forgetting: ContextVersion,
        version: ContextVersion,
        token_ids: IntArray,
        clear_forks: ClearForks,
    ) -> list[str]:
        """Delete state of versions that did not come from `forgetting`, and that of forks."""

        def saw(version_id: str) -> bool:
            return not came_after(self.history, version_id, forgetting.id)

        reasons = []
        sequence = self.sequence
        if len(sequence.token_ids) and saw(sequence.version):
            reasons.append("an edit says forget: state that saw the old text was deleted")
            sequence.truncate(sequence.clean_prefix(token_ids))
        sequence.versions.drop([kept for kept in sequence.versions if saw(kept)])
        shown = match_replies(forgetting.messages, list(self.replies)).values()
        kept_replies = [reply for reply in self.replies if reply in shown]
        self.replies = deque(kept_replies, maxlen=MOST_REPLIES)
        if forgetting.forgotten is not None:
            clear_forks(forgetting.forgotten.threads, forgetting.id)
        if self._stored is not None:
            self._stored.forget(saw, sweep=forgetting.id == version.id)
        return reasons

    def fetch(self, version: ContextVersion) -> list[str]:
        """Where there is no state in memory, take what the store has.

        Returns:
            Reasons for the report.
        """
        if self._stored is None or len(self.sequence.token_ids) or len(self.sequence.versions):
            return []
        try:
            found = self._stored.newest(past.id for past in ancestry(self.history, version))
            if found is not None:
                self.sequence.adopt(*found)
        except CheckpointError as error:
            return [f"stored state could not be read: {error}"]
        return []
