"""States that several methods start from: each context is prefilled once, and stored as needed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.context import Conversation, render
from patchkv_agents.engine import Engine, Reply, Thread
from patchkv_agents.recovery import Edited, Exact, RecoveryPolicy, Window

LOSSLESS = PrecisionPolicy.lossless()


@dataclass(frozen=True, slots=True, eq=False)
class StoredState:
    """A context that was answered and suspended.

    Attributes:
        context: the context; others of the same tokens share this state.
        thread: suspended; to be forked, not to be used up.
        reply: of the exact prefill. Its times are those of a cold start.
        store_ms: from suspending it until all rows were stored.
    """

    context: Conversation
    thread: Thread
    reply: Reply
    store_ms: float


class SharedStates:
    """The states of some contexts, shared by all that is measured on them.

    Every context, told by its tokens, is prefilled once. Use as a context manager, or call
    `close`: its threads go then.

    Args:
        engine: runs everything. Threads whose names begin with `compare/` are dropped.
        answer_tokens: most tokens of each context's own answer.
        maps: whether states have attention maps of blocks, which some selections need.
    """

    def __init__(self, engine: Engine, *, answer_tokens: int, maps: bool = False) -> None:
        self._engine = engine
        self._exact = RecoveryPolicy("exact", Exact(records_map=maps))
        # Restores every row. What an exact policy recovers is not packed.
        self._packing = RecoveryPolicy(
            "stored", Window(0, tail_tokens=1, rule=Edited(0.0) if maps else None)
        )
        self._answer_tokens = answer_tokens
        self._states: dict[tuple[bytes, PrecisionPolicy], StoredState] = {}
        self._threads: set[str] = set()
        self._count = 0

    def exact(self, context: Conversation) -> StoredState:
        """The state of an exact prefill, stored losslessly."""
        return self.stored(context, LOSSLESS)

    def stored(self, context: Conversation, storage: PrecisionPolicy) -> StoredState:
        """The state of an exact prefill, stored in the formats that `storage` chooses."""
        tokens = render(context, self._engine.tokenizer).token_ids.tobytes()
        if (tokens, LOSSLESS) not in self._states:
            thread, reply = self.resume(
                None, context, self._exact, max_new_tokens=self._answer_tokens
            )
            self._states[tokens, LOSSLESS] = StoredState(
                context, thread, reply, self._suspend(thread)
            )
        if (tokens, storage) not in self._states:
            exact = self._states[tokens, LOSSLESS]
            # Rows and scores are those of the exact state: only the last token is computed again.
            # The version is the same one, too: the lossless rows go when these are stored.
            thread, _ = self.resume(
                exact.thread, exact.context, self._packing, max_new_tokens=1, storage=storage
            )
            self._states[tokens, storage] = StoredState(
                exact.context, thread, exact.reply, self._suspend(thread)
            )
        return self._states[tokens, storage]

    def resume(
        self,
        origin: Thread | None,
        context: Conversation,
        policy: RecoveryPolicy,
        *,
        max_new_tokens: int,
        storage: PrecisionPolicy | None = None,
    ) -> tuple[Thread, Reply]:
        """Answer a context on a fork of `origin`, which stays as it is; on a new thread if None.

        Args:
            origin: from whose state it is answered.
            context: to be answered.
            policy: how it is recovered.
            max_new_tokens: of the answer.
            storage: the formats in which the fork's rows are packed; the origin's if left out.

        Returns:
            The fork, live, to be given to `release`; and the answer.
        """
        self._count += 1
        name = f"compare/{self._count}"
        self._engine.drop(name)
        if origin is not None:
            thread = origin.fork(name, storage=storage)
        else:
            thread = self._engine.thread(name, storage=storage or LOSSLESS)
        self._threads.add(name)
        try:
            reply = thread.generate(
                context.messages,
                tools=context.tools,
                policy=policy,
                max_new_tokens=max_new_tokens,
            )
        except BaseException:
            self.release(thread)
            raise
        return thread, reply

    def release(self, thread: Thread) -> None:
        """Give up a thread that `resume` made."""
        self._engine.drop(thread.id)
        self._threads.discard(thread.id)

    def close(self) -> None:
        """Give up all states."""
        for name in self._threads:
            self._engine.drop(name)
        self._threads.clear()
        self._states.clear()

    def _suspend(self, thread: Thread) -> float:
        """Store a thread's state; nothing of it is left to do while others are timed."""
        started = time.perf_counter()
        thread.suspend("now")
        self._engine.flush()
        return (time.perf_counter() - started) * 1e3

    def __enter__(self) -> SharedStates:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
