"""Serialization of checkpoints: a manifest, one blob of arrays, and parts of payloads.

- A **payload** is one stream of bytes: of each layer in turn the bytes of every tensor, as they lie
  in memory. The stream is cut into parts of equal size, so the first parts hold the first layers.
  Payloads never change and are shared, so their parts are written once.
- The **arrays** of a version are its token ids, origins, scores and extents, its block map (in
  float16) if it has one, and the block tables of its payloads, one behind the other.
- The **manifest** is one line with the schema and a checksum, then JSON: key, sizes, shapes and a
  checksum for each of the other blobs. It is written last.

Checksums are XXH3 with 128 bits (23 GiB/s per core measured, where zlib's CRC-32 reaches 2.0 and
BLAKE2b 0.9). They detect corruption, not an attacker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from patchkv_agents.checkpoint.block_map import MAP_BLOCK, BlockMap
from patchkv_agents.checkpoint.checkpoint import Checkpoint
from patchkv_agents.checkpoint.extents import Extent
from patchkv_agents.checkpoint.key import CheckpointKey
from patchkv_agents.errors import CheckpointError
from patchkv_kernels.payload import Payload, PayloadFormat

SCHEMA = 1
_MAGIC = b"patchkv-checkpoint"

Arrays = dict[str, npt.NDArray[Any]]


def checksum(data: bytes | memoryview) -> str:
    """XXH3 of `data`, 128 bits in hexadecimal."""
    from xxhash import xxh3_128_hexdigest

    return xxh3_128_hexdigest(data)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Name, dtype (`"float32"`) and shape of a payload's tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return int(np.prod(self.shape)) * _dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class PayloadRecord:
    """A payload as recorded in a manifest.

    Attributes:
        id: names the payload's parts; random.
        tensors: in the order in which each layer's bytes follow each other.
        part_bytes: size of every part but the last.
        checksums: of the parts.
    """

    id: str
    format: PayloadFormat
    tensors: tuple[TensorRecord, ...]
    part_bytes: int
    checksums: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def part_size(self, part: int) -> int:
        """Bytes of one part."""
        return min(self.part_bytes, self.nbytes - part * self.part_bytes)

    def first_layer(self, part: int) -> int:
        """First layer with bytes in a part."""
        return part * self.part_bytes * self.tensors[0].shape[0] // self.nbytes


class PayloadBytes:
    """A payload's tensors as the stream of bytes that is cut into parts.

    Args:
        payload: contiguous tensors are read and filled in place; others can only be read.
    """

    def __init__(self, payload: Payload, part_bytes: int) -> None:
        self.payload = payload
        self._part_bytes = part_bytes
        by_tensor = []
        for name, tensor in payload.tensors.items():
            if tensor.shape[0] != payload.layers:
                raise CheckpointError(f"{name} of a payload do not have the layers first")
            flat = tensor.detach().cpu().contiguous().view(torch.uint8)
            by_tensor.append(flat.reshape(payload.layers, -1).numpy())
        self._pieces = [memoryview(t[layer]) for layer in range(payload.layers) for t in by_tensor]
        self._stops = np.cumsum([len(piece) for piece in self._pieces])

    @property
    def parts(self) -> int:
        """Number of parts."""
        return -(-int(self._stops[-1]) // self._part_bytes)

    def read(self, part: int) -> bytes:
        """The bytes of a part."""
        return b"".join(self._slices(part))

    def fill(self, part: int, data: memoryview) -> None:
        """Write the bytes of a part into the payload's tensors."""
        start = 0
        for piece in self._slices(part):
            piece[:] = data[start : start + len(piece)]
            start += len(piece)

    def _slices(self, part: int) -> list[memoryview]:
        start = part * self._part_bytes
        stop = min(start + self._part_bytes, int(self._stops[-1]))
        slices = []
        index = int(np.searchsorted(self._stops, start, side="right"))
        while start < stop:
            end = int(self._stops[index])
            begin = end - len(self._pieces[index])
            slices.append(self._pieces[index][start - begin : min(stop, end) - begin])
            start = min(stop, end)
            index += 1
        return slices


def tensor_records(payload: Payload) -> tuple[TensorRecord, ...]:
    """The tensors of a payload as recorded in a manifest."""
    return tuple(
        TensorRecord(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in payload.tensors.items()
    )


def empty_payload(
    record: PayloadRecord, block_rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> Payload:
    """A payload with room for the recorded tensors, in pinned memory where there is a GPU."""
    pinned = torch.cuda.is_available()
    tensors = {
        tensor.name: torch.empty(tensor.shape, dtype=_dtype(tensor.dtype), pin_memory=pinned)
        for tensor in record.tensors
    }
    return Payload(format=record.format, block_rows=block_rows, positions=positions, **tensors)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a stored checkpoint.

    Attributes:
        arrays: name of the blob of arrays.
        arrays_checksum: of that blob.
        shapes: dtype and shape of each array in it, in order.
        payloads: those that the version refers to.
    """

    key: CheckpointKey
    arrays: str
    arrays_checksum: str
    shapes: Mapping[str, tuple[str, tuple[int, ...]]]
    payloads: tuple[PayloadRecord, ...]

    def encode(self) -> bytes:
        """The manifest as it is stored."""
        document = {
            "key": asdict(self.key),
            "byteorder": sys.byteorder,
            "arrays": self.arrays,
            "arrays_checksum": self.arrays_checksum,
            "shapes": self.shapes,
            "payloads": [
                {**asdict(record), "format": record.format.value} for record in self.payloads
            ],
        }
        body = json.dumps(document).encode()
        return b"%s %d %s\n%s" % (_MAGIC, SCHEMA, checksum(body).encode(), body)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest that `encode` made into `data`.

        Raises:
            CheckpointError: it is damaged, not a manifest, or of another schema or machine.
        """
        head, _, body = data.partition(b"\n")
        magic, _, rest = head.partition(b" ")
        schema, _, expected = rest.partition(b" ")
        if magic != _MAGIC or not schema.isdigit():
            raise CheckpointError(
                "the manifest of a stored checkpoint is damaged or another program's"
            )
        if int(schema) != SCHEMA:
            raise CheckpointError(
                f"a stored checkpoint has schema {int(schema)}, and this patchkv-agents reads "
                f"{SCHEMA}: use the release that wrote it, or delete the thread from the store"
            )
        if checksum(body).encode() != expected:
            raise CheckpointError("the manifest of a stored checkpoint is damaged")
        document = json.loads(body)
        if document["byteorder"] != sys.byteorder:
            raise CheckpointError(
                f"a stored checkpoint is of a {document['byteorder']}-endian machine, and this "
                f"one is {sys.byteorder}-endian: use separate stores"
            )
        return cls(
            key=CheckpointKey(**document["key"]),
            arrays=document["arrays"],
            arrays_checksum=document["arrays_checksum"],
            shapes={n: (dtype, tuple(shape)) for n, (dtype, shape) in document["shapes"].items()},
            payloads=tuple(
                PayloadRecord(
                    id=record["id"],
                    format=PayloadFormat(record["format"]),
                    tensors=tuple(
                        TensorRecord(t["name"], t["dtype"], tuple(t["shape"]))
                        for t in record["tensors"]
                    ),
                    part_bytes=record["part_bytes"],
                    checksums=tuple(record["checksums"]),
                )
                for record in document["payloads"]
            ),
        )


def arrays_of(checkpoint: Checkpoint, payloads: Sequence[Payload]) -> Arrays:
    """A checkpoint as arrays, without the tensors of its payloads.

    Args:
        payloads: those that the checkpoint refers to; extents name them by their index here.
    """
    index = {payload: number for number, payload in enumerate(payloads)}
    extents = [(index[e.payload], e.row, e.length, e.position) for e in checkpoint.extents]
    arrays: Arrays = {
        "token_ids": checkpoint.token_ids,
        "origins": checkpoint.origins,
        "scores": checkpoint.scores,
        "extents": np.array(extents, dtype=np.int64).reshape(-1, 4),
    }
    if checkpoint.block_map is not None:
        arrays["block_map"] = checkpoint.block_map.mass.astype(np.float16)
    for number, payload in enumerate(payloads):
        arrays[f"block_rows.{number}"] = payload.block_rows
        arrays[f"positions.{number}"] = payload.positions
    return arrays


def checkpoint_of(arrays: Arrays, payloads: Sequence[Payload]) -> Checkpoint:
    """The checkpoint of which `arrays_of` made the arrays. Its block map is rounded to float16."""
    mass = arrays.get("block_map")
    return Checkpoint(
        token_ids=arrays["token_ids"],
        origins=arrays["origins"],
        scores=arrays["scores"],
        extents=tuple(
            Extent(payloads[number], row, length, position)
            for number, row, length, position in arrays["extents"].tolist()
        ),
        block_map=None if mass is None else BlockMap(MAP_BLOCK, mass.astype(np.float32)),
    )


def joined(arrays: Arrays) -> tuple[bytes, dict[str, tuple[str, tuple[int, ...]]]]:
    """The bytes of all arrays, and their dtypes and shapes."""
    shapes = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
    return b"".join(array.tobytes() for array in arrays.values()), shapes


def split(data: bytes | memoryview, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> Arrays:
    """The arrays that `joined` made into `data`; copies."""
    arrays: Arrays = {}
    start = 0
    for name, (dtype, shape) in shapes.items():
        count = int(np.prod(shape))
        flat = np.frombuffer(data, dtype=dtype, count=count, offset=start)
        arrays[name] = flat.reshape(shape).copy()
        start += flat.nbytes
    return arrays


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a stored checkpoint has the unknown dtype {name}")
    return dtype
