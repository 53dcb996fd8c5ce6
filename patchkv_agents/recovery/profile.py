"""The profile: what was fitted to one model, frozen in a JSON file, and whether it may be used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.errors import InputError, ProfileError
from patchkv_agents.files import write_atomic
from patchkv_agents.recovery.files import (
    from_json,
    parse_json,
    policy_from_json,
    policy_to_json,
    storage_from_json,
    to_json,
)
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.setup import RecoverySetup
from patchkv_agents.recovery.shipped import profile_file

T = TypeVar("T")

NOT_A_PROFILE = "give a file that `patchkv profile` wrote"
SCHEMA = 3
"""Version of the file's form."""


def setup_sha256(setup: RecoverySetup) -> str:
    """A digest of all fields of a policy and its storage, in hex: equal where both are."""
    return _sha256([policy_to_json(setup.policy), to_json(setup.storage)])


def _sha256(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class DataSource:
    """What pairs were taken.

    Attributes:
        name: of the file, data set or database, without its folder.
        sha256: of the pairs, in hex.
        pairs, tasks: how many.
    """

    name: str
    sha256: str
    pairs: int
    tasks: int

    def __post_init__(self) -> None:
        if min(self.pairs, self.tasks) < 0:
            raise InputError(f"'pairs' {self.pairs} and 'tasks' {self.tasks} are counts")


@dataclass(frozen=True, slots=True)
class Measure:
    """A measured figure.

    Attributes:
        value: the figure.
        low, high: its 95 % interval.
        n: how many pairs it is from.
    """

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Validation:
    """What `patchkv validate` found.

    Attributes:
        reasons: why the policy did not pass; empty if it passed.
        measures: figures by name.
        thresholds: limits by name, such as `first_token_kl_median`.
        data: the pairs.
        setup_sha256: of the policy and the storage that were validated.
        fingerprint: of the model on which it was.
        created: the time in UTC.
        command: that did it.
        versions: of this package, Python, torch and transformers.
    """

    reasons: tuple[str, ...]
    measures: Mapping[str, Measure]
    thresholds: Mapping[str, float]
    data: tuple[DataSource, ...]
    setup_sha256: str
    fingerprint: str
    created: str
    command: str
    versions: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether every threshold was met."""
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """The validation as JSON has it."""
        return {"passed": self.passed, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Profile:
    """What offline profiling found for one model.

    Attributes:
        model: the model's name, for people.
        fingerprint: the model's fingerprint, which decides.
        policy: what an engine runs; called `patchkv`.
        published: the published rules with numbers fitted to this model; called
            `patchkv_published`.
        storage: the formats in which rows are packed, for both.
        data: what was fitted to.
        fit: every fitted number and what it was chosen from, as JSON.
        versions: of this package, Python, torch and transformers.
        created: the time in UTC.
        command: that made it.
        validation: the last one, if there was one.

    Raises:
        ProfileError: a policy has another name.
    """

    model: str
    fingerprint: str
    policy: RecoveryPolicy
    published: RecoveryPolicy
    storage: PrecisionPolicy
    data: tuple[DataSource, ...]
    fit: Mapping[str, Any]
    versions: Mapping[str, str]
    created: str
    command: str
    validation: Validation | None = None

    def __post_init__(self) -> None:
        for policy, name in ((self.policy, "patchkv"), (self.published, "patchkv_published")):
            if policy.name != name:
                raise ProfileError(f"a profile's policy is called '{policy.name}': call it {name}")

    @property
    def setup(self) -> RecoverySetup:
        """What an engine runs: the policy and its storage."""
        return RecoverySetup(self.policy, self.storage)

    @property
    def has_passed(self) -> bool:
        """Whether this very policy, with this storage, has passed validation on this model."""
        found = self.validation
        return (
            found is not None
            and found.passed
            and found.setup_sha256 == setup_sha256(self.setup)
            and found.fingerprint == self.fingerprint
        )

    @property
    def setups_sha256(self) -> str:
        """A digest of policies and storage, in hex: equal where the methods made from them are."""
        policies = [policy_to_json(policy) for policy in (self.policy, self.published)]
        return _sha256([*policies, to_json(self.storage)])

    @property
    def why_not_passed(self) -> str:
        """Why `has_passed` is false; empty if it is true."""
        if self.has_passed:
            return ""
        if self.validation is None:
            return "it was not validated yet"
        if self.validation.passed:
            return "it was changed after it was validated"
        return "validation found: " + "; ".join(self.validation.reasons)

    def validated_as(self, earlier: Profile) -> Profile:
        """The profile with the validation of an earlier one that found the same from the same."""
        same = (
            earlier.fingerprint == self.fingerprint
            and earlier.data == self.data
            and setup_sha256(earlier.setup) == setup_sha256(self.setup)
        )
        return replace(self, validation=earlier.validation) if same else self

    def check(self, fingerprint: str, model: str) -> None:
        """Check that this is the profile of a model.

        Args:
            fingerprint: of the model.
            model: its name.

        Raises:
            ProfileError: it is another model's.
        """
        if fingerprint == self.fingerprint:
            return
        other = f"this model is {model} ({fingerprint[:12]})"
        if model == self.model:
            other += ", of the same name with other weights, tokenizer, dtype or configuration"
        raise ProfileError(
            f"the profile was made for {self.model} ({self.fingerprint[:12]}), and {other}: make "
            f"one for it with `patchkv profile {model} --quick --out PROFILE`, or leave the "
            "profile out"
        )

    def to_json(self) -> dict[str, Any]:
        """The profile as JSON has it."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "policy": policy_to_json(self.policy),
            "published": policy_to_json(self.published),
            "storage": to_json(self.storage),
            "data": [asdict(source) for source in self.data],
            "fit": dict(self.fit),
            "versions": dict(self.versions),
            "created": self.created,
            "command": self.command,
            "validation": None if self.validation is None else self.validation.to_json(),
        }

    @classmethod
    def from_json(cls, document: Any) -> Profile:
        """The profile of which `to_json` made this document.

        Raises:
            ProfileError: it is none, or of another schema.
        """
        if not isinstance(document, dict):
            raise ProfileError(f"a profile is a JSON object: {NOT_A_PROFILE}")
        schema = document.get("schema", SCHEMA)
        if schema != SCHEMA:
            raise ProfileError(
                f"the profile has schema {schema!r}, and this release reads schema {SCHEMA}: make "
                "it again with `patchkv profile`, or install the release that made it"
            )
        try:
            fields: dict[str, Any] = {**from_json(_ProfileForm, document)}
        except InputError as error:
            raise ProfileError(f"the profile cannot be used: {error}. Profile again") from error
        validation: dict[str, Any] | None = fields.pop("validation")
        del fields["schema"]
        return cls(
            policy=_part(policy_from_json, fields.pop("policy"), "policy"),
            published=_part(policy_from_json, fields.pop("published"), "published"),
            storage=_part(storage_from_json, fields.pop("storage"), "storage"),
            validation=None if validation is None else _validation(**validation),
            **fields,
        )

    def save(self, path: str | Path) -> None:
        """Write the profile, in place of what the file held; whole or not at all.

        Raises:
            ProfileError: a number is not finite, or the file cannot be written.
        """
        path = Path(path)
        try:
            text = json.dumps(self.to_json(), indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ProfileError(
                f"the profile holds what JSON does not ({error}): check the model's weights and "
                "dtype, and profile again"
            ) from error
        try:
            write_atomic(path, text + "\n")
        except OSError as error:
            raise ProfileError(
                f"cannot write the profile {path} ({error.strerror or error}): choose another path"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile.

        Args:
            path: a file; or the name of a profile that comes with the package, such as `smollm2`.

        Raises:
            ProfileError: there is none, or it cannot be used.
        """
        file = profile_file(path)
        try:
            return cls.from_json(parse_json(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise ProfileError(
                f"cannot read the profile {file} ({error.strerror or error})"
            ) from error
        except (InputError, ProfileError) as error:
            raise ProfileError(f"{file}: {error}: {NOT_A_PROFILE}") from error
        except UnicodeDecodeError as error:
            raise ProfileError(f"{file} is not JSON: {NOT_A_PROFILE}") from error


def _part(read: Callable[[Any], T], document: Any, name: str) -> T:
    try:
        return read(document)
    except InputError as error:
        raise ProfileError(f"the profile's {name} cannot be used: {error}") from error


def _validation(passed: bool, **fields: Any) -> Validation:
    validation = Validation(**fields)
    if passed is not validation.passed:
        raise ProfileError(
            "the validation says both that it passed and that it did not: run `patchkv validate`"
        )
    return validation


class _ValidationForm(TypedDict):
    """A validation's fields in a file."""

    passed: bool
    reasons: tuple[str, ...]
    measures: dict[str, Measure]
    thresholds: dict[str, float]
    data: tuple[DataSource, ...]
    setup_sha256: str
    fingerprint: str
    created: str
    command: str
    versions: dict[str, str]


class _ProfileForm(TypedDict):
    """A profile's fields in a file."""

    schema: int
    model: str
    fingerprint: str
    policy: dict[str, Any]
    published: dict[str, Any]
    storage: dict[str, Any]
    data: tuple[DataSource, ...]
    fit: dict[str, Any]
    versions: dict[str, str]
    created: str
    command: str
    validation: _ValidationForm | None
