"""Work beside the model: kernels and copies on other CUDA streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch


def side_streams(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """A CUDA stream for each device, on which what is queued inside runs beside the model.

    They begin after what the model has been given until now (not until the context is entered),
    and leaving the context waits for them. On other devices the context does nothing.
    """
    streams = []
    for device in devices:
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            streams.append(stream)

    @contextmanager
    def entered() -> Iterator[None]:
        try:
            with ExitStack() as stack:
                for stream in streams:
                    stack.enter_context(torch.cuda.stream(stream))
                yield
        finally:
            for stream in streams:
                stream.synchronize()

    return entered()
