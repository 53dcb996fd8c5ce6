"""Runs an iterator in a thread of its own, and hands what it yields to asynchronous code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator
from contextvars import copy_context
from typing import TypeVar, cast

from patchkv_langchain.graph_steps import note_event_loop

T = TypeVar("T")


async def iterate_in_thread(iterator: Generator[T, None, None]) -> AsyncIterator[T]:
    """Yield what a generator yields, while it runs ahead in a thread with this context.

    Where the iteration ends early, by cancellation too, the generator is closed after the step that
    it is in.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[str, T | BaseException | None]] = asyncio.Queue()
    ended = threading.Event()

    def put(kind: str, item: T | BaseException | None = None) -> None:
        if not ended.is_set():
            try:
                loop.call_soon_threadsafe(queue.put_nowait, (kind, item))
            except RuntimeError:  # the loop is closed, so nobody is waiting
                ended.set()

    def run() -> None:
        note_event_loop(loop)
        try:
            for item in iterator:
                if ended.is_set():
                    break
                put("item", item)
            put("end")
        except BaseException as error:
            put("error", error)
        finally:
            iterator.close()

    threading.Thread(
        target=copy_context().run, args=(run,), name="patchkv-chat", daemon=True
    ).start()
    try:
        while True:
            kind, item = await queue.get()
            if kind == "end":
                return
            if kind == "error":
                raise cast(BaseException, item)
            yield cast(T, item)
    finally:
        ended.set()
