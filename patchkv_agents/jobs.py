"""Running jobs beside the caller, or in its place where that is not possible."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

Result = TypeVar("Result")


def submitted(job: Callable[[], Result], worker: Executor | None) -> Future[Result]:
    """The outcome of `job`, to come from `worker`.

    It is there already if there is no worker, or if that takes no jobs any more: it was shut down,
    or the interpreter is on its way out, which ends all executors before their work is done.
    """
    if worker is not None:
        try:
            return worker.submit(job)
        except RuntimeError:
            pass
    future: Future[Result] = Future()
    try:
        future.set_result(job())
    except Exception as error:
        future.set_exception(error)
    return future
