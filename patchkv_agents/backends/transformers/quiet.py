"""Silence of Transformers in one thread.

Its settings of warnings and progress bars hold for the whole process. A filter and a hook that ask
which thread is calling leave the output of other threads as it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Silence(logging.Filter):
    """Drops the warnings and progress bars of the threads that asked for it.

    Installed in Transformers while there is at least one such thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._users = 0
        self._thread = threading.local()
        self._handlers: list[logging.Handler] = []
        self._previous: Callable[..., Any] | None = None

    @contextmanager
    def applied(self, *, progress: bool) -> Iterator[None]:
        """Silence the calling thread while open; nested calls only add."""
        from transformers.utils import logging as library

        outer = self._warnings, self._bars
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._handlers = list(library.get_logger("transformers").handlers)
                for handler in self._handlers:
                    handler.addFilter(self)
                self._previous = library.set_tqdm_hook(self._bar)
        self._thread.warnings, self._thread.bars = True, outer[1] or not progress
        try:
            yield
        finally:
            self._thread.warnings, self._thread.bars = outer
            with self._lock:
                self._users -= 1
                if not self._users:
                    for handler in self._handlers:
                        handler.removeFilter(self)
                    library.set_tqdm_hook(self._previous)

    @property
    def _warnings(self) -> bool:
        return bool(getattr(self._thread, "warnings", False))

    @property
    def _bars(self) -> bool:
        return bool(getattr(self._thread, "bars", False))

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown."""
        return record.levelno >= logging.ERROR or not self._warnings

    def _bar(self, factory: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if self._bars:
            kwargs = {**kwargs, "disable": True}
        if self._previous is not None:
            return self._previous(factory, args, kwargs)
        return factory(*args, **kwargs)


_SILENCE = _Silence()


@contextmanager
def quiet_transformers(*, progress: bool = False) -> Iterator[None]:
    """Silence Transformers' warnings and, unless `progress`, its progress bars.

    Only in the calling thread; other threads see and write what they did before.
    """
    with _SILENCE.applied(progress=progress):
        yield
