"""What a server's requests did: kept in memory, bounded, for its page and its metrics."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from patchkv_agents.context import (
    ContextVersion,
    Conversation,
    Edit,
    RenderedContext,
    ThreadKey,
    render,
)
from patchkv_agents.engine import Engine
from patchkv_agents.engine.outcomes import AnsweredCall, CallOutcome, FailedCall
from patchkv_agents.records import edit_record
from patchkv_server.gauges import Gauges
from patchkv_server.metrics import TenantMetrics
from patchkv_server.misses import Miss, examine, may_have_missed
from patchkv_server.savings import SavingsEstimate
from patchkv_server.strips import KINDS, Strip, counts, strip

MAX_THREADS = 256
MAX_ANSWERS = 40
"""Answers that are remembered of each thread."""
MAX_EDITS = 8
"""Edits that are shown of an answer; the others are counted."""
MAX_INDICES = 4
LONGEST_NAME = 80
_MAX_EXAMINED = 64
"""Misses that wait to be explained; those that come beyond are not."""

_LOG = logging.getLogger(__name__)

OwnerOf = Callable[[ThreadKey], tuple[str, str]]
"""Of a thread of the engine: the tenant, and the name by which the client knows the thread."""


@dataclass(slots=True)
class _Answer:
    """One answer. `miss` comes later; everything else stays."""

    number: int
    ended_s: float
    took_ms: float
    policy: str
    is_exact: bool
    complete: bool
    fallback: bool
    tokens: dict[str, int]
    strip: Strip
    output_tokens: int
    resume_ttft_ms: float
    planning_ms: float
    restored_bytes: int
    saved_rows: int
    saved_ms: float | None
    edits: tuple[dict[str, Any], ...]
    edits_left_out: int
    miss: Miss | None = None


@dataclass(slots=True)
class _ThreadActivity:
    number: int
    key: ThreadKey
    tenant: str
    name: str
    answers: deque[_Answer] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERS))
    answered: int = 0
    saved_rows: int = 0
    saved_ms: float = 0.0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))


class Activity:
    """Observes an engine. Keeps no text of any context unless `log_content` is set.

    Why a request missed is found in a worker of its own, after the answer.

    Args:
        engine: whose answers are observed; set it as the engine's observer.
        metrics: told of each answer.
        owner_of: tenant and name of a thread.
        log_content: keep excerpts of contexts around misses.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: TenantMetrics,
        owner_of: OwnerOf,
        *,
        log_content: bool = False,
    ) -> None:
        self.log_content = log_content
        self._engine = engine
        self._metrics = metrics
        self._owner_of = owner_of
        self._savings = SavingsEstimate()
        self._threads: OrderedDict[ThreadKey, _ThreadActivity] = OrderedDict()  # by last use
        self._made = 0
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="patchkv-explain")
        self._examining = 0

    def __call__(self, outcome: CallOutcome) -> None:
        """Record a call."""
        tenant, name = self._owner_of(outcome.thread)
        if isinstance(outcome, FailedCall):
            for metrics in self._metrics.of(tenant):
                metrics.failed()
            return
        answered = outcome
        for metrics in self._metrics.of(tenant):
            metrics.answered(answered)
        with self._lock:
            self._savings.measure(answered)
            thread = self._threads.get(answered.thread)
            if thread is None or (thread.tenant, thread.name) != (tenant, name):
                self._made += 1
                thread = _ThreadActivity(self._made, answered.thread, tenant, name)
                self._threads[answered.thread] = thread
            self._threads.move_to_end(answered.thread)
            if len(self._threads) > MAX_THREADS:
                self._threads.popitem(last=False)
            answer = self._noted(thread, answered)
            examined = may_have_missed(answered) and self._examining < _MAX_EXAMINED
            self._examining += examined
        if examined:
            self._worker.submit(self._examine, answered, answer)
        if any(edit.forget for edit in answered.edits):
            self._worker.submit(self._forget_excerpts, tenant)

    def state(self, gauges: Gauges, tenant: str | None, selected: int | None) -> dict[str, Any]:
        """What a page shows, as JSON values. The size is bounded.

        Args:
            gauges: of the server.
            tenant: whose threads are shown; None for all.
            selected: number of the thread whose answers are told in full.
        """
        places = gauges.places(tenant)
        with self._lock:
            threads = [
                thread
                for thread in reversed(self._threads.values())
                if tenant is None or thread.tenant == tenant
            ]
            chosen = next((thread for thread in threads if thread.number == selected), None)
            return {
                "model": self._engine.model_name,
                "policy": self._engine.policy.name,
                "kinds": KINDS,
                "queue": asdict(gauges.queue(tenant)),
                "memory": asdict(gauges.memory(tenant)),
                "totals": {
                    "answers": sum(thread.answered for thread in threads),
                    "tokens": {kind: sum(t.tokens[kind] for t in threads) for kind in KINDS},
                    "saved_rows": sum(thread.saved_rows for thread in threads),
                    "saved_ms": sum(thread.saved_ms for thread in threads),
                    "ms_per_row": self._savings.ms_per_row,
                },
                "threads": [_overview(thread, places.get(thread.key)) for thread in threads],
                "selected": None if chosen is None else _details(chosen),
            }

    def close(self) -> None:
        """Explain nothing any more."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _noted(self, thread: _ThreadActivity, answered: AnsweredCall) -> _Answer:
        report, reply, edits = answered.report, answered.reply, answered.edits
        saved_rows, saved_ms = self._savings.saved(answered)
        thread.answered += 1
        thread.saved_rows += saved_rows
        thread.saved_ms += saved_ms or 0.0
        answer = _Answer(
            number=thread.answered,
            ended_s=answered.ended_ns / 1e9,
            took_ms=(answered.ended_ns - answered.started_ns) / 1e6,
            policy=report.policy,
            is_exact=report.is_exact,
            complete=reply is not None,
            fallback=report.fallback_reason is not None,
            tokens=counts(answered.plan),
            strip=strip(answered.plan),
            output_tokens=0 if reply is None else len(reply.token_ids),
            resume_ttft_ms=report.resume_ttft_ms,
            planning_ms=report.planning_ms,
            restored_bytes=report.payload_bytes,
            saved_rows=saved_rows,
            saved_ms=saved_ms,
            edits=tuple(_edit(edit) for edit in edits[:MAX_EDITS]),
            edits_left_out=max(0, len(edits) - MAX_EDITS),
        )
        for kind, tokens in answer.tokens.items():
            thread.tokens[kind] += tokens
        thread.answers.append(answer)
        return answer

    def _examine(self, answered: AnsweredCall, answer: _Answer) -> None:
        try:
            miss = examine(answered, self._render, log_content=self.log_content)
        except Exception as error:  # such as a template's; a text of it may be in its message
            _LOG.warning("why a request missed could not be found: %s", type(error).__name__)
            miss = None
        with self._lock:
            self._examining -= 1
            answer.miss = miss
        if miss is not None:
            for metrics in self._metrics.of(self._owner_of(answered.thread)[0]):
                metrics.missed(miss)

    def _forget_excerpts(self, tenant: str) -> None:
        """Drop what was quoted of a tenant's contexts: it may be what was to be forgotten."""
        with self._lock:
            for thread in self._threads.values():
                for answer in thread.answers:
                    if thread.tenant == tenant and answer.miss is not None:
                        answer.miss = answer.miss.without_excerpts()

    def _render(self, version: ContextVersion) -> RenderedContext:
        conversation = Conversation(version.messages, version.tools)
        arguments = version.template_args.load()
        return render(conversation, self._engine.tokenizer, template_args=arguments)


def _edit(edit: Edit) -> dict[str, Any]:
    record = edit_record(edit)
    return {
        **record,
        "author": edit.author and edit.author[:LONGEST_NAME],
        "old_indices": record["old_indices"][:MAX_INDICES],
        "new_indices": record["new_indices"][:MAX_INDICES],
        "messages": max(len(edit.old_indices), len(edit.new_indices)),
    }


def _overview(thread: _ThreadActivity, place: str | None) -> dict[str, Any]:
    last = thread.answers[-1]
    return {
        "number": thread.number,
        "name": thread.name[:LONGEST_NAME],
        "tenant": thread.tenant[:LONGEST_NAME],
        "place": place,
        "answers": thread.answered,
        "ended_s": last.ended_s,
        "tokens": last.tokens,
        "saved_ms": thread.saved_ms,
        "cause": last.miss and last.miss.cause,
    }


def _details(thread: _ThreadActivity) -> dict[str, Any]:
    return {
        "number": thread.number,
        "name": thread.name[:LONGEST_NAME],
        "answers": [_shown(answer) for answer in reversed(thread.answers)],
    }


def _shown(answer: _Answer) -> dict[str, Any]:
    values = {item.name: getattr(answer, item.name) for item in fields(answer)}
    return {**values, "miss": answer.miss and asdict(answer.miss)}
