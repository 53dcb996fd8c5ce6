"""Shadow checks: a sample of approximate answers is prefilled exactly as well, in the background.

It says how far recovery is from a full prefill on the contexts that are really asked, with no
effect on them. A check runs while nobody is answered; what is being checked never leaves memory.
"""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from patchkv_agents.context import ThreadKey
from patchkv_agents.divergence import first_token_kl
from patchkv_agents.errors import InputError
from patchkv_agents.ranges import IntArray

PATIENCE_S = 30.0
"""How long a check waits for a pause before it takes turns with those who are answered."""

_KEPT_RESULTS = 1_000
_MAX_PENDING = 2  # one is checked, one waits
_LOG = logging.getLogger(__name__)

ExactLogits = Callable[[IntArray, Callable[[], None]], torch.Tensor]
"""Logits of the last of some tokens by a full prefill; calls its second argument in each pause."""


@dataclass(frozen=True, slots=True)
class ShadowResult:
    """One answer beside a full prefill of its context.

    Attributes:
        thread: that was answered.
        policy: name of the policy that recovered its context.
        tokens: of the prompt.
        first_token_kl: KL(full prefill || policy) of the first token, in nats.
        top1_agree: whether both have the same most likely first token.
        check_ms: what the prefill took, pauses included.
    """

    thread: ThreadKey
    policy: str
    tokens: int
    first_token_kl: float
    top1_agree: bool
    check_ms: float


@dataclass(frozen=True, slots=True)
class ShadowChecks:
    """Which answers are checked.

    Attributes:
        share: of the approximate answers, more than 0 and up to 1.
        seed: of the sample.
        report: told of each result, in a thread of its own. What it raises is logged.

    Raises:
        InputError: the share is out of its range.
    """

    share: float = 0.05
    seed: int = 0
    report: Callable[[ShadowResult], None] | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise InputError(
                f"the share of shadow checks is {self.share}: use more than 0, up to 1"
            )


@dataclass(frozen=True, slots=True)
class ShadowSummary:
    """What was checked so far.

    Attributes:
        checks: answers that were checked.
        agreed: of these, how many had the full prefill's most likely first token.
        dropped: answers of the sample for which there was no time (one is checked, one waits), or
            that were given up: a thread was told to forget, or the checks were closed.
        failed: checks that ended with an error, which is logged.
        first_token_kl_median, first_token_kl_p95, first_token_kl_max: of the last thousand checks,
            in nats; None before the first one.
    """

    checks: int
    agreed: int
    dropped: int
    failed: int
    first_token_kl_median: float | None
    first_token_kl_p95: float | None
    first_token_kl_max: float | None


class ShadowStopped(Exception):
    """Nobody wants the result of a check any more."""


class Shadow:
    """Checks a sample of an engine's approximate answers, one at a time.

    Args:
        settings: which are checked.
        exact_logits: the full prefill.
    """

    def __init__(self, settings: ShadowChecks, exact_logits: ExactLogits) -> None:
        self._settings = settings
        self._exact_logits = exact_logits
        self._sample = random.Random(settings.seed)
        self._changed = threading.Condition()
        self._answering = self._pending = 0
        self._waiting: deque[tuple[ThreadKey, str, IntArray, torch.Tensor]] = deque()
        self._worker: threading.Thread | None = None
        self._checks = self._agreed = self._dropped = self._failed = 0
        self._kls: deque[float] = deque(maxlen=_KEPT_RESULTS)
        self._stopped = False
        self._forgotten = 0  # how often
        _LIVE.add(self)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While a thread is answered: checks wait for it to end."""
        with self._changed:
            self._answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()

    def offer(
        self, thread: ThreadKey, policy: str, token_ids: IntArray, logits: torch.Tensor
    ) -> None:
        """Check an approximate answer if it is of the sample. Returns at once, and never raises.

        Args:
            thread, policy: of the answer.
            token_ids: of its prompt, int64 `[tokens]`; not to be changed any more.
            logits: of its first token, `[vocab]`; likewise.
        """
        with self._changed:
            if self._stopped or self._sample.random() >= self._settings.share:
                return
            if self._pending == _MAX_PENDING:
                self._dropped += 1
                return
            if self._worker is None:
                # The end of the process does not wait for it to be done: see `_close_all`.
                worker = threading.Thread(target=self._work, name="patchkv-shadow", daemon=True)
                try:
                    worker.start()
                except RuntimeError:  # no thread can be had, or the interpreter is on its way out
                    self._dropped += 1
                    return
                self._worker = worker
            self._pending += 1
            self._waiting.append((thread, policy, token_ids, logits))

    def summary(self) -> ShadowSummary:
        """What was checked so far."""
        with self._changed:
            kls = np.array(self._kls)
            median, p95, most = np.quantile(kls, [0.5, 0.95, 1.0]) if len(kls) else [None] * 3
            return ShadowSummary(
                self._checks,
                self._agreed,
                self._dropped,
                self._failed,
                *(None if figure is None else float(figure) for figure in (median, p95, most)),
            )

    def flush(self) -> None:
        """Wait until what was offered so far is checked."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def forget(self) -> None:
        """Give up what is checked and what waits, as where a context has to be forgotten."""
        with self._changed:
            self._forgotten += 1
            self._dropped += len(self._waiting)  # what is checked counts where it ends
            self._pending -= len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Give up what is checked and what waits; nothing is checked any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    def _work(self) -> None:
        """Check what waits; ends where nothing does, so that no idle thread holds the engine."""
        while True:
            with self._changed:
                if not self._waiting:
                    self._worker = None
                    return
                entry = self._waiting.popleft()
                forgotten = self._forgotten  # under the same lock: `forget` misses no entry
            self._run(*entry, forgotten)

    def _run(
        self,
        thread: ThreadKey,
        policy: str,
        token_ids: IntArray,
        logits: torch.Tensor,
        forgotten: int,
    ) -> None:
        try:
            result = self._check(thread, policy, token_ids, logits, forgotten)
            if self._settings.report is not None:
                self._settings.report(result)
        except ShadowStopped:
            with self._changed:
                self._dropped += 1
        except Exception:
            with self._changed:
                self._failed += 1
            _LOG.exception("a shadow check failed")
        finally:
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()

    def _check(
        self,
        thread: ThreadKey,
        policy: str,
        token_ids: IntArray,
        logits: torch.Tensor,
        forgotten: int,
    ) -> ShadowResult:
        started = time.perf_counter()
        patient_until = time.monotonic() + PATIENCE_S
        with self._changed:
            self._stop_unless_wanted(forgotten)
        exact = self._exact_logits(token_ids, lambda: self._give_way(patient_until, forgotten))
        kl = first_token_kl(exact, logits.to(exact.device))
        agree = int(exact.argmax()) == int(logits.argmax())
        with self._changed:
            self._stop_unless_wanted(forgotten)
            self._checks += 1
            self._agreed += agree
            self._kls.append(kl)
        check_ms = (time.perf_counter() - started) * 1e3
        return ShadowResult(thread, policy, len(token_ids), kl, agree, check_ms)

    def _give_way(self, patient_until: float, forgotten: int) -> None:
        """Wait while anybody is answered, as long as there is patience.

        Raises:
            ShadowStopped: the checks were closed, or something was forgotten since.
        """
        with self._changed:
            while self._answering and not self._stopped and self._forgotten == forgotten:
                left_s = patient_until - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._stop_unless_wanted(forgotten)

    def _stop_unless_wanted(self, forgotten: int) -> None:
        """Stop a check that began when things had been forgotten so often; `_changed` is held."""
        if self._stopped or self._forgotten != forgotten:
            raise ShadowStopped


_LIVE: weakref.WeakSet[Shadow] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Give up all checks at the end of the process, which runs on until then only for a moment."""
    for shadow in list(_LIVE):
        shadow.close()
