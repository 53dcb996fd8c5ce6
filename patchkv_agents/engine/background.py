"""Work beside the model: kernels and copies on another CUDA stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def side_stream(device: torch.device) -> AbstractContextManager[None]:
    """A CUDA stream on which what is queued inside the context runs beside the model.

    It begins after what the model has been given until now (not until the context is entered), and
    leaving the context waits for it. On other devices the context does nothing.
    """
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def entered() -> Iterator[None]:
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()

    return entered()
