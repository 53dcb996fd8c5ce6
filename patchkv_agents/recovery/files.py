"""Policies, storage and profiles as JSON, read from files that people may have edited."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any, TypeVar

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.errors import InputError
from patchkv_agents.recovery.methods.registry import KINDS
from patchkv_agents.recovery.policy import RecoveryPolicy

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """A dataclass with all of its fields, by name, as JSON has them."""
    return _plain(value)


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        value = asdict(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def parse_json(text: str) -> Any:
    """JSON with finite numbers only.

    Raises:
        InputError: it is not JSON, or holds a number that is none.
    """
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is not JSON ({error})") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InputError(
            f"it holds the number {text}: the model gave broken figures when it was made, so check "
            "the model's weights and dtype, and profile again"
        )
    return number


def from_json(kind: type[T], fields: Any) -> T:
    """A value of a dataclass (or another type that pydantic knows) from its JSON.

    Raises:
        InputError: a field is unknown, missing, or has a wrong value.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        value = TypeAdapter(kind).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        raise InputError(_explained(error.errors())) from error
    unknown = sorted(_unknown(fields, _plain(value)))
    if unknown:
        raise InputError(f"it has unknown fields {unknown}: install the release that wrote it")
    return value


def _unknown(given: Any, read: Any) -> set[str]:
    """Names of fields that were given and did not become part of the value."""
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        inner = (_unknown(given[name], read[name]) for name in given.keys() & read.keys())
        return {*(given.keys() - read.keys())}.union(*inner)
    if isinstance(given, list) and isinstance(read, list):
        return set().union(*map(_unknown, given, read))
    return set()


def _explained(errors: Any) -> str:
    """What is wrong, of a union what is wrong with the alternative that was meant."""
    others = {e["loc"][:-1] for e in errors if e["type"] == "literal_error"}
    told = [e for e in errors if not any(e["loc"][: len(o)] == o for o in others)] or errors
    lines = []
    for error in told:
        where = ".".join(map(str, error["loc"]))
        lines.append(
            f"it lacks '{where}'" if error["type"] == "missing" else f"'{where}': {error['msg']}"
        )
    return "; ".join(lines)


def policy_to_json(policy: RecoveryPolicy) -> dict[str, Any]:
    """All fields of a policy, by name, as JSON has them."""
    return {"name": policy.name, "method": to_json(policy.method)}


def policy_from_json(fields: Any) -> RecoveryPolicy:
    """The policy of which `policy_to_json` made these fields.

    Raises:
        InputError: a field is unknown, missing, or has a wrong value.
    """
    if not isinstance(fields, dict) or fields.keys() != {"name", "method"}:
        raise InputError("a policy is a JSON object with 'name' and 'method'")
    name, method = fields["name"], fields["method"]
    kind = method.get("kind") if isinstance(method, dict) else None
    if not isinstance(name, str) or kind not in KINDS:
        raise InputError(f"its method's 'kind' is {kind!r}: use one of {', '.join(KINDS)}")
    return RecoveryPolicy(name, from_json(KINDS[kind], method))


def storage_from_json(fields: Any) -> PrecisionPolicy:
    """The storage precision of which `to_json` made these fields.

    Raises:
        InputError: a field is unknown, missing, or has a wrong value.
    """
    return from_json(PrecisionPolicy, fields)
