"""The versions of one conversation of an agent, where its chat model does not keep them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from patchkv_agents.context import ContextHistory, ContextVersion, parse_tools
from patchkv_agents.context.lineage.checkpoints import Search
from patchkv_langchain.conversations import Relation, named_relation
from patchkv_langchain.graph_steps import GraphStep, StepVersions
from patchkv_langchain.records import declared_edits

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

    from patchkv_agents.context import FrozenJson, Message

_MAX_COMPARED = 256  # newest versions among which one that was made before is looked for


class AgentLog:
    """Commits what a model is shown, each version to its branch.

    Attributes:
        history: the versions.
        step: where in a graph the last call was.
        context: messages of the last call.
        is_busy: never; a log is used for a moment only.
    """

    is_busy = False

    def __init__(self, history: ContextHistory) -> None:
        self.history = history
        self.step: GraphStep | None = None
        self.context: Sequence[Message] = history.head.messages if history.head else ()
        self._versions = StepVersions()
        self._lock = threading.Lock()

    def relation(self, messages: Sequence[Message]) -> Relation:
        """What a context is to this conversation."""
        return named_relation(self.context, messages) if self.context else "continued"

    def commit(
        self,
        messages: Sequence[BaseMessage],
        shown: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        step: GraphStep | None,
    ) -> Search[ContextVersion | None]:
        """Make what the model is shown a version, after the one that it was made from.

        To be run by `asking` or `aasking`.

        Args:
            messages, shown: in LangChain's form, and as ours.
            tools: schemas.
            step: of the graph around, if there is one.

        Returns:
            The version; None if there was one of this context already.

        Raises:
            ContextError, HistoryStoreError: it cannot be stored.
        """
        found: ContextVersion | str | None = None
        if step is not None:
            found = yield from self._versions.parent(self.history, step, shown)
        with self._lock:
            head = self.history.head
            parent = head if found is None else None if isinstance(found, str) else found
            if parent is not None and head is not None and parent.id == head.id:
                parent = head
            schemas = parse_tools(tools)
            version = self._same(parent, shown, schemas)
            is_new = version is None
            if version is None:
                version = self.history.commit(
                    shown,
                    tools=schemas,
                    edits=declared_edits(parent.messages if parent else (), messages, shown=shown),
                    parent=None if parent is head else parent or "",
                    checkpoint_id=None if step is None else step.checkpoint,
                )
            elif version is not head:
                self.history.checkout(version)
            self.context = shown
            if step is not None:
                self._versions.note(step, version.id)
            return version if is_new else None

    def _same(
        self,
        parent: ContextVersion | None,
        shown: Sequence[Message],
        tools: tuple[FrozenJson, ...],
    ) -> ContextVersion | None:
        """The parent, or a version made from it, if it has this context: steps may run again."""
        wanted = tuple(shown), tools
        if parent is not None and (parent.messages, parent.tools) == wanted:
            return parent
        if parent is self.history.head:
            return None
        parents = () if parent is None else (parent.id,)
        for version_id in reversed(self.history.version_ids()[-_MAX_COMPARED:]):
            version = self.history.get(version_id)
            is_child = version.parents[:1] == parents
            if is_child and (version.messages, version.tools) == wanted:
                return version
        return None
