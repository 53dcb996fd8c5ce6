"""A checkpointer that tells a history what happens to checkpoints and threads."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_id,
)

from patchkv_agents.context.lineage.checkpoints import Link
from patchkv_langgraph.checkpoints import LinkCache, link_of
from patchkv_langgraph.notices import warn


class Histories(Protocol):
    """What a tracked saver tells of its threads: a `GraphHistory`."""

    is_tracked: bool

    def delete_thread(self, thread_id: str) -> None:
        """Delete the versions of a thread."""

    def copy_thread(self, source_id: str, target_id: str) -> None:
        """Give a new thread the versions of another one."""


class TrackedSaver(BaseCheckpointSaver[Any]):
    """Passes everything on to another checkpointer. Made by `GraphHistory.saver`.

    `delete_thread` and `copy_thread` do the same to the thread's versions, as does `prune` with the
    strategy `"delete"`. Deleting single checkpoints leaves the versions.

    Attributes:
        saver: the other checkpointer.
        links: between the checkpoints that were written and read here.
    """

    def __init__(self, saver: BaseCheckpointSaver[Any], history: Histories) -> None:
        super().__init__(serde=saver.serde)
        self.saver = saver
        self._history = history
        self.links = LinkCache()

    def __getattr__(self, name: str) -> Any:
        if name == "saver":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.saver, name)

    @property
    def config_specs(self) -> list[Any]:
        """As the other one's."""
        return self.saver.config_specs

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Passed on, and the checkpoint's parent noted."""
        return self._seen(config, self.saver.get_tuple(config))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Passed on, and the checkpoint's parent noted."""
        return self._seen(config, await self.saver.aget_tuple(config))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Passed on."""
        return self.saver.list(config, filter=filter, before=before, limit=limit)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Passed on."""
        async for found in self.saver.alist(config, filter=filter, before=before, limit=limit):
            yield found

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Passed on, and the checkpoint's parent noted."""
        self._note(config, checkpoint, metadata)
        return self.saver.put(config, checkpoint, metadata, new_versions)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Passed on, and the checkpoint's parent noted."""
        self._note(config, checkpoint, metadata)
        return await self.saver.aput(config, checkpoint, metadata, new_versions)

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Passed on."""
        self.saver.put_writes(config, writes, task_id, task_path)

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Passed on."""
        await self.saver.aput_writes(config, writes, task_id, task_path)

    def delete_thread(self, thread_id: str) -> None:
        """Delete the thread's checkpoints and versions."""
        self.saver.delete_thread(thread_id)
        self._forget(thread_id)

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete the thread's checkpoints and versions."""
        await self.saver.adelete_thread(thread_id)
        await asyncio.to_thread(self._forget, thread_id)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy the thread's checkpoints and versions.

        Raises:
            NotImplementedError: the other checkpointer cannot copy threads; nothing was copied.
        """
        self.saver.copy_thread(source_thread_id, target_thread_id)
        self._history.copy_thread(source_thread_id, target_thread_id)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """As `copy_thread`."""
        await self.saver.acopy_thread(source_thread_id, target_thread_id)
        await asyncio.to_thread(self._history.copy_thread, source_thread_id, target_thread_id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Passed on; the strategy `"delete"` deletes versions too."""
        self.saver.prune(thread_ids, strategy=strategy)
        self._pruned(thread_ids, strategy)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Passed on; the strategy `"delete"` deletes versions too."""
        await self.saver.aprune(thread_ids, strategy=strategy)
        await asyncio.to_thread(self._pruned, thread_ids, strategy)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Passed on."""
        self.saver.delete_for_runs(run_ids)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Passed on."""
        await self.saver.adelete_for_runs(run_ids)

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, Any]:
        """Passed on."""
        return self.saver.get_delta_channel_history(config=config, channels=channels)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, Any]:
        """Passed on."""
        return await self.saver.aget_delta_channel_history(config=config, channels=channels)

    def get_next_version(self, current: Any, channel: None) -> Any:
        """As the other one's."""
        return self.saver.get_next_version(current, channel)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> TrackedSaver:
        """A copy of this around the other one's copy."""
        clone = copy.copy(self)
        clone.saver = self.saver.with_allowlist(extra_allowlist)
        clone.serde = clone.saver.serde
        return clone

    def _pruned(self, thread_ids: Sequence[str], strategy: str) -> None:
        if strategy == "delete":
            for thread_id in thread_ids:
                self._forget(thread_id)

    def _forget(self, thread_id: str) -> None:
        self.links.forget(thread_id)
        self._history.delete_thread(thread_id)

    def _seen(
        self, config: RunnableConfig, saved: CheckpointTuple | None
    ) -> CheckpointTuple | None:
        if saved is not None:
            configurable = config["configurable"]
            self.links.note(
                str(configurable["thread_id"]),
                configurable.get("checkpoint_ns") or "",
                link_of(saved),
                is_newest=not get_checkpoint_id(config),
            )
        return saved

    def _note(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata
    ) -> None:
        configurable = config["configurable"]
        self.links.note(
            str(configurable["thread_id"]),
            configurable.get("checkpoint_ns") or "",
            Link(checkpoint["id"], get_checkpoint_id(config), metadata.get("source")),
            is_newest=True,
        )
        if not self._history.is_tracked:
            self._history.is_tracked = True  # said once
            warn(
                "history.saver() records nothing by itself: wrap the graph's nodes with "
                "track_edits(node, history=history), or use PatchKVMiddleware in create_agent."
            )
