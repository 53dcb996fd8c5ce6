"""Reads fields of a record, which may have any shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchkv_evals.datasets.rows import RowError

Record = Mapping[str, Any]


def text(record: Record, *names: str) -> str:
    """The first of the named fields that is there, as text; a number is one too.

    Raises:
        RowError: none is there, or it is not text.
    """
    for name in names:
        value = record.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if value is not None:
            raise RowError(f"field {name!r} is not text")
    raise RowError(f"no field {names[0]!r}")


def texts(record: Record, name: str) -> list[str]:
    """A list of texts; empty if the field is missing or null.

    Raises:
        RowError: the field is something else.
    """
    value = record.get(name)
    if value is None:
        return []
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return list(value)
    raise RowError(f"field {name!r} is not a list of texts")


def items(record: Record, name: str) -> list[Any]:
    """A list of anything; empty if the field is missing or null.

    An object of equally long lists, as Hugging Face `datasets` gives for a list of objects, is
    turned into that list.

    Raises:
        RowError: the field is something else.
    """
    value = record.get(name)
    if value is None:
        return []
    if isinstance(value, Mapping):
        columns = [list(column) for column in value.values() if isinstance(column, list | tuple)]
        if len(columns) != len(value) or len({len(column) for column in columns}) > 1:
            raise RowError(f"field {name!r} is not a list")
        return [dict(zip(value, cells, strict=True)) for cells in zip(*columns, strict=True)]
    if isinstance(value, list | tuple):
        return list(value)
    raise RowError(f"field {name!r} is not a list")
