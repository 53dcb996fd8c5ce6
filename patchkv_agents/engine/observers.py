"""Who is notified of an engine's calls: an observer, and shadow checks."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

from patchkv_agents.engine.outcomes import AnsweredCall, CallOutcome, Observer
from patchkv_agents.engine.shadow import Shadow
from patchkv_agents.ranges import IntArray

_LOG = logging.getLogger(__name__)


class CallObservers:
    """Passes what becomes of calls on. None of it can make a call fail.

    Attributes:
        observer: called after each call; None for nobody.
        shadow: compares a sample of approximate answers with full prefills; None does not.
    """

    def __init__(self, observer: Observer | None, shadow: Shadow | None) -> None:
        self.observer = observer
        self.shadow = shadow

    def answering(self) -> AbstractContextManager[None]:
        """To be held while a thread is answered: shadow checks make way."""
        return nullcontext() if self.shadow is None else self.shadow.answering()

    def forget(self) -> None:
        """Drop what a shadow check has of any context."""
        if self.shadow is not None:
            self.shadow.forget()

    def notify(self, outcome: CallOutcome, token_ids: IntArray) -> None:
        """Pass on what became of a call, and compare its answer if that is due.

        Args:
            outcome: of the call.
            token_ids: of its prompt, int64 `[tokens]`.
        """
        if self.observer is not None:
            try:
                self.observer(outcome)
            except Exception:
                _LOG.exception("the engine's observer failed")
        if self.shadow is None or not isinstance(outcome, AnsweredCall):
            return
        reply, report = outcome.reply, outcome.report
        if reply is not None and not report.is_exact:
            self.shadow.offer(outcome.thread, report.policy, token_ids, reply.first_logits)
