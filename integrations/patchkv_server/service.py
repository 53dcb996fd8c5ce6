"""Requests on their way through the engine: waiting, answered in worker threads, cancelled."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchkv_agents.context import ThreadKey
from patchkv_agents.context.answers import Answer, AnswerPiece, AnswerStyle
from patchkv_agents.engine.answer_run import AnswerRun
from patchkv_server.answers import Answered, Piece
from patchkv_server.errors import ApiError
from patchkv_server.gauges import MemoryByTier, Place, QueueLengths
from patchkv_server.metrics import TenantMetrics
from patchkv_server.queueing import FairQueue
from patchkv_server.settings import ServerSettings
from patchkv_server.threads import Claim, ThreadTable

if TYPE_CHECKING:
    from patchkv_agents.checkpoint.stores import CheckpointStore
    from patchkv_agents.engine import Engine, Thread
    from patchkv_agents.engine.generation import SamplingOptions
    from patchkv_agents.engine.reply import Reply, StreamChunk
    from patchkv_server.requests import ChatRequest

_LOG = logging.getLogger(__name__)

_STORE_STATS_S = 30.0
_RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class Ready:
    """The request was taken up: the model runs."""

    thread: str


Event = Ready | Piece | Answered | BaseException


class Ticket:
    """A request on its way. Made by `Service.submit`.

    Attributes:
        request: what is asked.
        arrived: time of `time.monotonic`.
        called_ns: the same time, of `time.perf_counter_ns`.
        cancelled: nobody waits for the answer any more.
    """

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.arrived = time.monotonic()
        self.called_ns = time.perf_counter_ns()
        self.cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def next(self) -> Event:
        """What happens next; an exception or `Answered` is the last."""
        return await self._events.get()

    def put(self, event: Event) -> None:
        """Tell what happens, from any thread."""
        if not self.cancelled.is_set():
            call_soon(self._loop, self._events.put_nowait, event)


class Service:
    """One engine for the requests of all tenants.

    `submit`, `cancel`, `start`, `finish` and `close` are for the event loop. The engine runs in
    worker threads; what it computes for a request that is cancelled it gives up at the next token,
    and a prefill it ends first, so that the same request may be repeated.

    Args:
        engine: answers.
        settings: limits.
        store: the engine's, if it has one.
        metrics: is told what happens.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        metrics: TenantMetrics,
        store: CheckpointStore | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.threads = ThreadTable(
            engine,
            most=settings.max_threads,
            has_store=store is not None,
            on_failure=self._log_failure,
        )
        self._metrics = metrics
        self._store = store
        self._store_bytes: tuple[float, int | None] = (-_STORE_STATS_S, None)
        engine.pool.memory_budget_bytes = settings.memory_budget_bytes
        self._style = AnswerStyle.of(engine.tokenizer)
        self._queue: FairQueue[Ticket] = FairQueue(settings.max_waiting)
        self._running: set[Ticket] = set()
        self._workers = ThreadPoolExecutor(settings.max_running, "patchkv-answer")
        self._keeper = ThreadPoolExecutor(1, "patchkv-keeper")
        self._keeping: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Take up the threads of an earlier process, and begin to keep house."""
        self._loop = asyncio.get_running_loop()
        await self._loop.run_in_executor(self._keeper, self.threads.rediscover)
        self._keeping = asyncio.create_task(self._keep())

    async def finish(self, within_s: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Take up no more requests, and give answers under way so many seconds to end.

        Args:
            within_s: the answers that take longer end with an error.
            is_urgent: asked again and again whether all of them have to end now.
        """
        self._is_closed = True
        for ticket in [*self._queue]:
            ticket.put(_closed())
        end = time.monotonic() + within_s
        while self._running and time.monotonic() < end and not is_urgent():
            await asyncio.sleep(0.02)
        for ticket in [*self._running]:
            ticket.put(_closed())
            ticket.cancelled.set()

    async def close(self) -> None:
        """End all answers, and store the threads."""
        await self.finish(0.0)
        if self._keeping is not None:
            self._keeping.cancel()
        await asyncio.to_thread(self._workers.shutdown)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._keeper, self.threads.suspend_all)
        await loop.run_in_executor(self._keeper, self.engine.flush)
        self._keeper.shutdown(wait=False)

    def submit(self, request: ChatRequest) -> Ticket:
        """Let a request wait for its turn.

        Where too many wait, it is refused, or another one of a tenant that has more waiting.

        Raises:
            ApiError: 429, too many are waiting; 503, the server is shutting down.
        """
        if self._is_closed:
            raise _closed()
        ticket = Ticket(request)
        free = self.settings.max_running - self._queue.running  # these do not have to wait
        refused = self._queue.put(request.tenant, ticket, beyond=free)
        if refused is not None:
            error = ApiError(
                429,
                f"{len(self._queue)} requests are waiting already: try again later",
                code="queue_full",
                headers={"Retry-After": str(_RETRY_AFTER_S)},
            )
            if refused is ticket:
                raise error
            refused.put(error)
        self._dispatch()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Give up a request; does nothing if it is done."""
        if self._queue.remove(ticket.request.tenant, ticket) or ticket in self._running:
            if not ticket.cancelled.is_set():
                for metrics in self._metrics.of(ticket.request.tenant):
                    metrics.cancelled()
            ticket.cancelled.set()

    def queue(self, tenant: str | None = None) -> QueueLengths:
        """How many requests wait, and how many are being answered; of one tenant or of all."""
        if tenant is not None:
            return QueueLengths(*self._queue.lengths(tenant))
        return QueueLengths(waiting=len(self._queue), running=self._queue.running)

    def memory(self, tenant: str | None = None) -> MemoryByTier:
        """Bytes of state, by where it is; of one tenant, or of all and of the store."""
        live, suspended = self.threads.memory(tenant)
        return MemoryByTier(live, suspended, self._store_bytes[1] if tenant is None else None)

    def places(self, tenant: str | None = None) -> Mapping[ThreadKey, Place]:
        """Where the state of each thread is; of one tenant or of all."""
        return self.threads.places(tenant)

    def _dispatch(self) -> None:
        """Begin with what can be begun with."""
        while self._queue.running < self.settings.max_running and not self._is_closed:
            taken = self._queue.take(lambda ticket: self.threads.claim(ticket.request))
            if taken is None:
                return
            ticket, claim = taken
            self._running.add(ticket)
            for metrics in self._metrics.of(ticket.request.tenant):
                metrics.waited(time.monotonic() - ticket.arrived)
            self._workers.submit(self._run, ticket, claim, asyncio.get_running_loop())

    def _done(self, ticket: Ticket) -> None:
        self._running.discard(ticket)
        self._queue.done(ticket.request.tenant)
        self._dispatch()

    async def _keep(self) -> None:
        """Suspend what is idle, and give up what is too much; until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            await loop.run_in_executor(self._keeper, self._tidy)

    # In worker threads

    def _tidy(self) -> None:
        try:
            if self.settings.idle_suspend_s is not None:
                self.threads.suspend_idle(self.settings.idle_suspend_s)
            for tenant in self.threads.fit(self.settings.memory_budget_bytes):
                for metrics in self._metrics.of(tenant):
                    metrics.evicted()
            if self._store is not None:
                now = time.monotonic()
                if now - self._store_bytes[0] >= _STORE_STATS_S:
                    self._store_bytes = now, self._store.stats().stored_bytes
        except Exception as error:  # it is tried again
            self._log_failure("keeping house failed", error)
        if self._loop is not None:  # something may wait for a thread that was being suspended
            call_soon(self._loop, self._dispatch)

    def _run(self, ticket: Ticket, claim: Claim, loop: asyncio.AbstractEventLoop) -> None:
        thread: Thread | None = None
        answered = False
        end: Event | None = None
        try:
            thread = self._open(claim, ticket.request)
            with closing(self._answer(ticket, thread, claim.entry.name)) as events:
                for event in events:
                    answered = answered or not isinstance(event, Ready)
                    if isinstance(event, Answered):
                        end = event
                        break
                    if ticket.cancelled.is_set():
                        break
                    ticket.put(event)
        except BaseException as error:
            end = error
        finally:
            # The last word comes when the thread is free, so that the next request finds it so.
            try:
                self.threads.release(claim, thread, answered=answered)
                self._keeper.submit(self._tidy)
            except Exception as error:
                self._log_failure("a thread could not be given back", error)
            if end is not None:
                ticket.put(end)
            call_soon(loop, self._done, ticket)

    def _open(self, claim: Claim, request: ChatRequest) -> Thread:
        """The engine's thread, with what another one has of its beginning."""
        engine, key, source = self.engine, claim.entry.key, claim.source
        try:
            thread = engine.thread(key.thread, namespace=key.namespace)
            if source is not None and not len(thread.sequence.token_ids):
                thread.share_prefix(
                    engine.thread(source.key.thread, namespace=source.key.namespace),
                    request.messages,
                    tools=request.tools,
                    template_args=request.template_args.load(),
                )
            return thread
        finally:
            if source is not None:
                self.threads.free(source)

    def _answer(
        self, ticket: Ticket, thread: Thread, name: str
    ) -> Generator[Ready | Piece | Answered, None, None]:
        request = ticket.request
        template_args = request.template_args.load()
        run = AnswerRun(
            self._style,
            request.tools,
            template_args=template_args,
            tool_choice=request.tool_choice,
            one_call=request.one_call,
            salt=request.salt,
        )
        started = time.perf_counter()
        sampling: SamplingOptions = {**request.sampling, **run.options}
        chunks = thread.stream(
            request.messages,
            tools=request.tools,
            template_args=template_args,
            called_ns=ticket.called_ns,
            **sampling,
        )
        yield Ready(name)
        if request.is_raw:
            reply = yield from _raw_pieces(chunks)
            answer = Answer(reply.text)
        else:
            for made in run.pieces(chunks):
                yield Piece(made.pieces, made.logprobs)
            reply, answer = run.reply, run.answer
        self._log(request, reply, name, time.perf_counter() - started)
        yield Answered(answer, reply, name)

    def _log_failure(self, what: str, error: Exception) -> None:
        log_failure(what, error, self.settings.log_content)

    def _log(self, request: ChatRequest, reply: Reply, name: str, seconds: float) -> None:
        report = reply.report
        _LOG.info(
            "%s %s: %d tokens (%d exact, %d restored), %d answered in %.2f s, first after %.0f ms",
            request.tenant,
            name,
            report.tokens,
            report.cache_read,
            report.restored,
            len(reply.token_ids),
            seconds,
            report.ttft_ms,
        )
        if report.omitted or report.notes:
            hidden = ", ".join(
                field if index < 0 else f"{field} of message {index}"
                for index, field in report.omitted
            )
            _LOG.warning(
                "%s %s: the chat template does not show: %s; shown in another form: %d",
                request.tenant,
                name,
                hidden or "nothing",
                len(report.notes),
            )
        if self.settings.log_content:
            _LOG.info("%s %s: %r -> %r", request.tenant, name, request.messages, reply.text)


def _raw_pieces(chunks: Iterator[StreamChunk]) -> Generator[Piece, None, Reply]:
    """The text of a stream as it is, and the reply at its end."""
    reply: Reply | None = None
    with closing(chunks):  # type: ignore[type-var]
        for chunk in chunks:
            yield Piece((AnswerPiece(chunk.text),), chunk.logprobs)
            reply = chunk.reply
    if reply is None:
        raise RuntimeError("the stream ended without a reply")
    return reply


def _closed() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")


def call_soon(loop: asyncio.AbstractEventLoop, job: Callable[..., object], *args: object) -> None:
    """Let the loop run a job, unless it is closed and nobody waits for it."""
    try:
        loop.call_soon_threadsafe(job, *args)
    except RuntimeError:
        pass


def log_failure(what: str, error: BaseException, with_content: bool) -> None:
    """Log an error by its kind and place; its words may repeat what a prompt says."""
    if with_content:
        _LOG.error(what, exc_info=error)
    else:
        places = "".join(traceback.format_tb(error.__traceback__))
        _LOG.error("%s: %s\n%s", what, type(error).__name__, places)
