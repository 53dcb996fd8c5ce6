"""A policy as JSON, as profiles hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.errors import InputError
from patchkv_agents.recovery.policy import (
    BlendMask,
    BlendPolicy,
    BlendScore,
    RecoveryPolicy,
    Selection,
)
from patchkv_agents.recovery.window import WindowModel
from patchkv_kernels import PayloadFormat

_COUNTS = ("window_tokens", "tail_tokens", "block_size")


def policy_to_json(policy: RecoveryPolicy) -> dict[str, Any]:
    """All fields of a policy, by name, as JSON has them."""
    plain: dict[str, Any] = _plain(asdict(policy))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def policy_from_json(fields: Mapping[str, Any]) -> RecoveryPolicy:
    """The policy of which `policy_to_json` made these fields.

    Raises:
        InputError: a field is unknown, missing, or has a wrong value.
    """
    given = dict(fields)
    try:
        _check_counts(given, _COUNTS)
        given["selection"] = Selection(given["selection"])
        if (blend := given["blend"]) is not None:
            score, mask = BlendScore(blend["score"]), BlendMask(blend["mask"])
            given["blend"] = BlendPolicy(**{**blend, "score": score, "mask": mask})
        if (window := given["window_model"]) is not None:
            coefficients = tuple(window["coefficients"])
            given["window_model"] = WindowModel(**{**window, "coefficients": coefficients})
        return RecoveryPolicy(**given)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"these are not the fields of a policy: {error}") from error


def storage_to_json(storage: PrecisionPolicy) -> dict[str, Any]:
    """All fields of a storage precision, by name, as JSON has them."""
    plain: dict[str, Any] = _plain(asdict(storage))
    return plain


def storage_from_json(fields: Any) -> PrecisionPolicy:
    """The storage precision of which `storage_to_json` made these fields.

    Raises:
        InputError: a field is unknown, missing, or has a wrong value.
    """
    try:
        name = fields["format"]
        format = None if name is None else PayloadFormat(name)
        return PrecisionPolicy(**{**fields, "format": format})
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"these are not the fields of a storage precision: {error}") from error


def _check_counts(fields: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if type(fields[name]) not in (int, type(None)):  # JSON has 16.0 and true as well
            raise InputError(f"{name} is {fields[name]!r}: use a whole number")
