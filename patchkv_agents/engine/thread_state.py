"""What a thread remembers of its versions, and what forgetting and storing do with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from patchkv_agents.context import (
    ContextHistory,
    ContextVersion,
    Conversation,
    Edit,
    FrozenJson,
    Message,
    SampledReply,
    ThreadKey,
    match_messages,
    match_replies,
    message_anchors,
)
from patchkv_agents.context.lineage.ancestry import (
    Ancestors,
    ForgettingSearch,
    ancestry,
    came_after,
    is_forgotten,
)
from patchkv_agents.context.lineage.continuation import Hashes, continued, message_hashes
from patchkv_agents.engine.branches import RowVersions
from patchkv_agents.engine.resumed import Resumed
from patchkv_agents.errors import CheckpointError
from patchkv_agents.ranges import BoolArray, IntArray
from patchkv_agents.recovery.donors import Anchors, OwnOf

if TYPE_CHECKING:
    from patchkv_agents.context.versioning.views import Ref
    from patchkv_agents.engine.persistence import StoredThread
    from patchkv_agents.engine.sequence import KVSequence, Packing

Spans = tuple[tuple[int, int], ...]
"""Token span of each message."""

MAX_REPLIES = 256
"""Answers whose sampled ids are kept; those of older ones are encoded anew."""
MAX_RECENT = 32
"""Recent versions, with which others are aligned, and which they may go on from."""

ClearForks = Callable[[Collection[ThreadKey], str], None]
"""Deletes the state of the threads of these histories, for the forgetting version of this id."""


@dataclass(frozen=True, slots=True)
class _RecentVersion:
    """A recent version: its messages, and where they stand if it was answered here."""

    hashes: Hashes
    parents: tuple[str, ...]
    spans: Spans = ()


class ThreadState:
    """All that an edit marked `forget` may have to take from a thread, and its history.

    Args:
        history: of the thread.
        sequence: its tokens and KV state.
        stored: its checkpoints in the engine's store, if there is one.

    Attributes:
        history, sequence: the same.
        replies: sampled ids of its answers, the newest last. Replaced, never changed.
        must_clear: everything goes at the next call: a fork forgot what this thread has seen.
    """

    def __init__(
        self, history: ContextHistory, sequence: KVSequence, stored: StoredThread | None
    ) -> None:
        self.history = history
        self.sequence = sequence
        self.replies: tuple[SampledReply, ...] = ()
        self.must_clear = False
        self._stored = stored
        self._recent: dict[str, _RecentVersion] = {}  # by version
        self._last: str | None = None  # id of the version answered last
        self._ancestors = Ancestors()
        self._row_versions = RowVersions()
        self._forgettings = ForgettingSearch()
        self._obeyed: set[str] = set()  # ids of forgetting versions, as far as memory goes
        # What forks and the store have still to delete:
        self._pending: dict[str, ContextVersion] = {}  # forgetting versions by id
        self._must_clear_stored = False

    def take_over(self, other: ThreadState, history: ContextHistory, sequence: KVSequence) -> None:
        """Become a fork of another state, with these copies of its history and sequence."""
        self.history = history
        self.sequence, self._obeyed = sequence, set(other._obeyed)
        self.replies, self._recent = other.replies, dict(other._recent)
        self._last, self._row_versions = other._last, other._row_versions.copy()
        self._ancestors = other._ancestors.copy()

    def add_reply(self, reply: SampledReply) -> None:
        """Remember the sampled ids of an answer."""
        self.replies = (*self.replies, reply)[-MAX_REPLIES:]

    def suspend(self, packing: Packing) -> None:
        """Store the KV state in CPU memory and, if there is a store, save it there."""
        if self.must_clear:
            self._clear_memory()
            with suppress(CheckpointError):  # tried again at the next call
                self._clear_stored()
        is_live = self.sequence.is_live
        checkpoint = self.sequence.suspend(packing)
        if is_live and checkpoint is not None and self._stored is not None:
            self._stored.save(self.sequence.version, checkpoint)

    def clear(self) -> None:
        """Delete all KV state and sampled ids, in memory and in the store.

        Raises:
            CheckpointError: the store cannot delete. What it has is not used, and the next call
                tries again.
        """
        self._clear_memory()
        self._clear_stored()

    def _clear_memory(self) -> None:
        self.sequence.clear()
        self.replies = ()
        self.must_clear = False
        self._must_clear_stored = self._stored is not None

    def _clear_stored(self) -> None:
        if self._must_clear_stored and self._stored is not None:
            self._stored.forget(lambda version: True, sweep=True)
        self._must_clear_stored = False

    def anchors(self, version: ContextVersion, spans: Spans, old: str) -> Anchors:
        """Where the messages that `version` shares with an old one stand in both."""
        recent = self._recent.get(old)
        if recent is None or not recent.spans:
            return ()
        matching = match_messages(self.history.get(old).messages, version.messages)
        return message_anchors(recent.spans, spans, matching)

    def own_rows(self, version: ContextVersion) -> OwnOf:
        """Tells which rows of other versions' states `version` may take over."""
        branch = self._ancestors.of(self.history, version)

        def own(other: str, tokens: int) -> BoolArray | None:
            # An ancestor has rows of this branch only. Where the history of stored state is lost,
            # nothing tells what it is to this version.
            if other in branch or other not in self.history:
                return None
            return self._row_versions.own(other, tokens, branch)

        return own

    def note(self, version: ContextVersion, spans: Spans, resumed: Resumed) -> None:
        """Keep what later versions need of one that was resumed."""
        self._last = version.id
        self._row_versions.note(version.id, resumed.plan, resumed.resumed_from)
        self._remember(version, spans)

    def base(self, messages: Sequence[Message]) -> ContextVersion | None:
        """The version that a context goes on from, as far as its messages tell (`continued`)."""
        head = self.history.head
        if head is None or self._last not in (None, head.id):
            return head  # somebody has checked it out
        if self._last is None:
            for version_id in sorted(self.history.branches().values())[-MAX_RECENT:]:
                self._remember(self.history.get(version_id))
        found = continued(
            messages,
            head.messages,
            {name: recent.hashes for name, recent in self._recent.items()},
            lambda name: name in self._ancestors.of(self.history, head),
        )
        return head if found is None else self.history.get(found)

    def place(
        self,
        context: Conversation,
        template_args: FrozenJson,
        *,
        edits: Sequence[Edit],
        parent: Ref | None,
        checkpoint_id: str | None,
    ) -> tuple[ContextVersion, tuple[Edit, ...]]:
        """The version of a context that is about to be answered, committed if there is none.

        Args:
            context, template_args: what the model is shown.
            edits: declared; without `parent` they are taken to be of the version worked on last.
            parent: what the context was made from; the empty string is nothing, and then it takes
                over nothing that is not exact. Found by its messages if left out.
            checkpoint_id: of the agent framework.

        Returns:
            The version, and the edits that made it; none if it was there already.
        """
        history, head = self.history, self.history.head
        if parent:
            base: ContextVersion | None = history.get(parent)
            base = head if head is not None and base == head else base
        else:
            base = head if edits else self.base(context.messages)
        if base is not None and not any(edit.forget for edit in edits):
            shown = context.messages, context.tools, template_args
            same = [] if base is head else [base.id]
            same += [name for name, recent in self._recent.items() if base.id in recent.parents[:1]]
            for name in same:
                version = history.get(name)
                if (version.messages, version.tools, version.template_args) == shown:
                    return history.checkout(version), ()
        version = history.commit(
            context.messages,
            tools=context.tools,
            template_args=template_args,
            edits=edits,
            parent=None if base is head else base,
            checkpoint_id=checkpoint_id,
        )
        if parent == "" and (base is None or version.id != base.id):
            self._ancestors.cut(version.id)
        return version, () if base is not None and version.id == base.id else version.edits

    def _remember(self, version: ContextVersion, spans: Spans = ()) -> None:
        self._recent.pop(version.id, None)
        self._recent[version.id] = _RecentVersion(
            message_hashes(version.messages), version.parents, spans
        )
        if len(self._recent) > MAX_RECENT:
            del self._recent[next(iter(self._recent))]

    def forget(
        self, version: ContextVersion, token_ids: IntArray, clear_forks: ClearForks
    ) -> list[str]:
        """Delete all state that saw what an edit up to `version` says to forget.

        Memory is cleaned at once. What forks and the store cannot delete now is not used by this
        thread, and deleted at a later call.

        Args:
            version: about to be answered.
            token_ids: its tokens; rows for the first of them that saw nothing stay.
            clear_forks: called where other threads saw the same.

        Returns:
            Reasons for the report.
        """
        reasons = []
        if self.must_clear:
            self._clear_memory()
        forgetting = self._forgettings.newest(self.history, version)
        if forgetting is not None and forgetting.id not in self._obeyed:
            reasons += self._forget_in_memory(forgetting, token_ids)
            self._obeyed.add(forgetting.id)
            self._pending[forgetting.id] = forgetting
        try:
            self._clear_stored()
            for pending in [*self._pending.values()]:
                self._forget_elsewhere(pending, clear_forks, sweep=pending.id == version.id)
                del self._pending[pending.id]
        except CheckpointError as error:
            reasons.append(f"stored state that saw forgotten text is not deleted yet: {error}")
        return reasons

    def _saw(self, forgetting: ContextVersion, version_id: str) -> bool:
        return not came_after(self.history, version_id, forgetting.id)

    def _forget_in_memory(self, forgetting: ContextVersion, token_ids: IntArray) -> list[str]:
        """Delete state of versions that did not come from `forgetting`."""
        reasons = []
        sequence = self.sequence
        if len(sequence.token_ids) and self._saw(forgetting, sequence.version):
            reasons.append("an edit says forget: state that saw the old text was deleted")
            sequence.truncate(sequence.clean_prefix(token_ids))
        sequence.versions.drop([kept for kept in sequence.versions if self._saw(forgetting, kept)])
        shown = match_replies(forgetting.messages, list(self.replies)).values()
        self.replies = tuple(reply for reply in self.replies if reply in shown)
        return reasons

    def _forget_elsewhere(
        self, forgetting: ContextVersion, clear_forks: ClearForks, *, sweep: bool
    ) -> None:
        """Delete the same from the store, and the state of forks."""
        if forgetting.forgotten is not None:
            clear_forks(forgetting.forgotten.threads, forgetting.id)
        if self._stored is not None:
            self._stored.forget(partial(self._saw, forgetting), sweep=sweep)

    def fetch(self, version: ContextVersion) -> list[str]:
        """Where there is no state in memory, take what the store has.

        Nothing that saw forgotten text is taken: the store may not have deleted it yet, or another
        process may have stored it since.

        Returns:
            Reasons for the report.
        """
        if (
            self._stored is None
            or self._must_clear_stored
            or len(self.sequence.token_ids)
            or len(self.sequence.versions)
        ):
            return []
        newest = self._forgettings.newest(self.history, version)
        forgettings = [*self._pending.values(), *([newest] if newest else [])]

        def usable(version_id: str) -> bool:
            saw = any(self._saw(forgetting, version_id) for forgetting in forgettings)
            return not saw and not is_forgotten(self.history, version_id)

        try:
            stored = self._stored.newest(
                (past.id for past in ancestry(self.history, version)), usable
            )
            if stored is not None:
                self.sequence.adopt(*stored)
        except CheckpointError as error:
            return [f"stored state could not be read: {error}"]
        return []

    def clear_for(self, forgetting: str) -> None:
        """Delete all state once for a version of another thread, by its id, that says to forget.

        Raises:
            CheckpointError: see `clear`.
        """
        if forgetting not in self._obeyed:
            self._obeyed.add(forgetting)
            self._clear_memory()
        self._clear_stored()
