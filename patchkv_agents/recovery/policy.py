"""A recovery policy: a method with its numbers, and the name by which reports call it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from patchkv_agents.errors import InputError
from patchkv_agents.recovery.methods.base import Method
from patchkv_agents.recovery.methods.registry import METHODS


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """What a resume may approximate, and how much it recomputes.

    Attributes:
        name: how reports call it.
        method: chooses the rows that are recomputed.

    Raises:
        InputError: a policy that approximates is called exact.
    """

    name: str
    method: Method

    def __post_init__(self) -> None:
        if self.name == "exact" and not self.method.is_exact:
            raise InputError("only an exact method may be called exact: choose another name")

    @property
    def is_exact(self) -> bool:
        """Whether every row behind an edit is recomputed."""
        return self.method.is_exact

    def varied(self, **changes: Any) -> RecoveryPolicy:
        """The policy with some of its method's numbers changed.

        Args:
            changes: fields of the method, by name.
        """
        return replace(self, method=replace(self.method, **changes))  # type: ignore[type-var]

    @classmethod
    def named(cls, name: str) -> RecoveryPolicy:
        """A method of the registry with its default numbers.

        Raises:
            InputError: there is no method of this name.
        """
        if name not in METHODS:
            raise InputError(f"there is no method '{name}': use one of {', '.join(METHODS)}")
        return cls(name, METHODS[name])

    @classmethod
    def exact(cls) -> RecoveryPolicy:
        """Lossless prefix reuse only: always the results of a full prefill."""
        return cls("exact", METHODS["prefix_cache"])

    @classmethod
    def default(cls) -> RecoveryPolicy:
        """Window, query tail and rows chosen by attention: an approximation."""
        return cls.named("patchkv")

    @classmethod
    def published(cls) -> RecoveryPolicy:
        """The paper's method without its offline profile: an approximation."""
        return cls.named("patchkv_published")
