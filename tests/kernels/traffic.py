"""Counts what a kernel loads and stores in Triton's interpreter, by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from triton.runtime.interpreter import interpreter_builder


@dataclass
class Traffic:
    """Addresses of all elements that were read or written, one array per operation.

    Lanes of one operation that name the same address count once, as on a GPU.
    """

    loads: list[np.ndarray] = field(default_factory=list)
    stores: list[np.ndarray] = field(default_factory=list)

    def loaded(self, tensor: torch.Tensor) -> np.ndarray:
        """How often each byte offset of the tensor's storage was loaded from; see `_counts`."""
        return _counts(self.loads, tensor)

    def stored(self, tensor: torch.Tensor) -> np.ndarray:
        return _counts(self.stores, tensor)


def _counts(operations: list[np.ndarray], tensor: torch.Tensor) -> np.ndarray:
    """Accesses of each element of the tensor's storage, `[elements]`."""
    storage = tensor.untyped_storage()
    start, size = storage.data_ptr(), tensor.element_size()
    addresses = np.concatenate(operations) if operations else np.empty(0, dtype=np.uint64)
    inside = addresses[(addresses >= start) & (addresses < start + storage.nbytes())]
    offsets = (inside - np.uint64(start)).astype(np.int64)
    assert not (offsets % size).any()
    return np.bincount(offsets // size, minlength=storage.nbytes() // size)


@contextmanager
def counted() -> Iterator[Traffic]:
    """Record every load and store of the kernels that run inside."""
    traffic = Traffic()
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def counting_load(ptrs, mask, *args):
        traffic.loads.append(_addresses(ptrs, mask))
        return load(ptrs, mask, *args)

    def counting_store(ptrs, value, mask, *args):
        traffic.stores.append(_addresses(ptrs, mask))
        return store(ptrs, value, mask, *args)

    interpreter_builder.create_masked_load = counting_load
    interpreter_builder.create_masked_store = counting_store
    try:
        yield traffic
    finally:
        del interpreter_builder.create_masked_load, interpreter_builder.create_masked_store


def _addresses(ptrs, mask) -> np.ndarray:
    return np.unique(np.broadcast_to(ptrs.data, mask.data.shape)[mask.data])
