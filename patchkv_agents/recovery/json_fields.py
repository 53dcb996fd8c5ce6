"""Reading JSON that people may have edited: every field is checked, and errors say what to do."""

from __future__ import annotations

import json
import math
from typing import Any

from patchkv_agents.errors import ProfileError

NOT_A_PROFILE = "give a file that `patchkv profile` wrote"


def parse_json(text: str) -> Any:
    """JSON with finite numbers only.

    Raises:
        ProfileError: it is not JSON, or holds a number that is none.
    """
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"this is not JSON ({error}): {NOT_A_PROFILE}") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ProfileError(
            f"it holds the number {text}: the model gave broken figures when it was made, so check "
            "the model's weights and dtype, and profile again"
        )
    return number


class JsonFields:
    """The fields of a JSON object, taken one by one.

    Args:
        document: the object.
        what: it is, for errors.

    Raises:
        ProfileError: it is no object; and each method, if the field is missing or has another type.
    """

    def __init__(self, document: Any, what: str) -> None:
        if not isinstance(document, dict):
            raise ProfileError(f"{what} is not a JSON object: {NOT_A_PROFILE}")
        self._left: dict[str, Any] = dict(document)
        self._what = what

    def take(self, name: str) -> Any:
        """The field, of any type."""
        if name not in self._left:
            raise ProfileError(f"{self._what} lacks '{name}': profile again")
        return self._left.pop(name)

    def text(self, name: str) -> str:
        """A text."""
        value = self.take(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def count(self, name: str) -> int:
        """A whole number of at least 0."""
        value = self.take(name)
        if type(value) is not int or value < 0:
            raise self._wrong(name, "a count")
        return value

    def number(self, name: str) -> float:
        """A finite number."""
        return self._number(name, self.take(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        value = self.list_of(name)
        if not all(isinstance(each, str) for each in value):
            raise self._wrong(name, "a list of texts")
        return tuple(value)

    def list_of(self, name: str) -> list[Any]:
        """A list of anything."""
        value = self.take(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object of anything."""
        value = self.take(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def texts_by_name(self, name: str) -> dict[str, str]:
        """An object of texts."""
        value = self.mapping(name)
        if not all(isinstance(each, str) for each in value.values()):
            raise self._wrong(name, "an object of texts")
        return value

    def numbers_by_name(self, name: str) -> dict[str, float]:
        """An object of finite numbers."""
        return {key: self._number(name, each) for key, each in self.mapping(name).items()}

    def end(self) -> None:
        """Check that there were no other fields."""
        if self._left:
            unknown = ", ".join(f"'{name}'" for name in sorted(self._left))
            raise ProfileError(f"{self._what} has unknown fields ({unknown}): take them out")

    def _number(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(name, "a finite number")
        return float(value)

    def _wrong(self, name: str, wanted: str) -> ProfileError:
        return ProfileError(f"'{name}' of {self._what} is not {wanted}: profile again")
