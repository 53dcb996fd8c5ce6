"""What can be set about a server."""

from __future__ import annotations

from dataclasses import dataclass

from patchkv_agents.errors import InputError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and habits of a server.

    Attributes:
        max_running: requests that are answered at the same time; they take turns at the model.
        max_waiting: requests that may wait for that; the next one is refused.
        max_body_bytes: longest body of a request.
        body_timeout_s: longest time for the body of a request to arrive.
        timeout_s: longest time from when a request has arrived to the end of its answer.
        max_tokens: longest answer where the request does not say.
        memory_budget_bytes: of KV state in memory, live and suspended, of all threads together.
            Beyond it, threads used longest ago are suspended, stored with loss, then given up.
            State of the threads that are answering is not given up for it.
        max_threads: threads that are remembered.
        idle_suspend_s: after so long without a request, a thread is suspended; None: only where
            memory is short, since suspended state may be stored with loss.
        keep_alive_s: how often a stream shows that it is alive while there is nothing to send.
        log_content: write what messages and answers say into the log.

    Raises:
        InputError: a value is out of its range.
    """

    max_running: int = 4
    max_waiting: int = 64
    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    timeout_s: float = 600.0
    max_tokens: int = 4096
    memory_budget_bytes: int = 8 * 2**30
    max_threads: int = 512
    idle_suspend_s: float | None = None
    keep_alive_s: float = 10.0
    log_content: bool = False

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value, least = getattr(self, name), 0 if name == "max_waiting" else 1
            if value is None:
                continue
            if name.endswith("_s"):
                if not value > 0:
                    raise InputError(f"{name} is {value}: it has to be more than 0")
            elif name != "log_content" and value < least:
                raise InputError(f"{name} is {value}: it has to be at least {least}")
