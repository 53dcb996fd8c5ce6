"""What a request asks for, whichever API it came by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from patchkv_agents.context import FrozenJson, Message
from patchkv_agents.engine.generation import SamplingOptions, sampling_params
from patchkv_agents.errors import InputError
from patchkv_server.errors import invalid
from patchkv_server.shapes import Shape

MAX_NAME = 200
"""Characters of a name of a thread or user."""

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True, eq=False)
class ChatRequest:
    """A request for an answer, checked.

    Attributes:
        tenant: whose it is.
        thread: name of the conversation, if one is given.
        messages, tools, template_args: the context.
        shape: of the context.
        tool_choice: `auto`, `none`, `any` or the name of a tool.
        one_call: at most one call of a tool is wanted.
        sampling: how the answer is made.
        stream: the answer is wanted in pieces.
        is_raw: the answer is text, in which neither reasoning nor calls are looked for.
    """

    tenant: str
    thread: str | None
    messages: tuple[Message, ...]
    tools: tuple[FrozenJson, ...]
    template_args: FrozenJson
    shape: Shape
    tool_choice: str
    one_call: bool
    sampling: SamplingOptions
    stream: bool
    is_raw: bool = False

    @property
    def salt(self) -> str:
        """What distinguishes this answer's calls from those of another: the context."""
        return blake2b("".join(self.shape.hashes).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Sender:
    """Where a request comes from.

    Attributes:
        tenant: whose it is.
        thread: name of the conversation by its header.
    """

    tenant: str
    thread: str | None


def read_json(body: bytes) -> dict[str, Any]:
    """The object in a body.

    Raises:
        ApiError: it is not one.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise invalid("the body is not JSON: send an object in UTF-8") from None
    if not isinstance(value, dict):
        raise invalid("the body has to be a JSON object")
    return value


def validated(model: type[Body], fields: Mapping[str, Any]) -> Body:
    """The fields as a model.

    Raises:
        ApiError: 400, naming the first field that is wrong.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = _path(first["loc"])
        problem = first["msg"].removeprefix("Value error, ")
        raise invalid(f"{field}: {problem[:1].lower()}{problem[1:]}", field) from None


def _path(place: Sequence[str | int]) -> str:
    """A place in the body as `tools[0].type`; names of alternatives among types are left out."""
    names = [part for part in place if isinstance(part, int) or part.replace("_", "").isalnum()]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names)
    return path.removeprefix(".")


def checked_name(name: str | None, field: str) -> str | None:
    """A name as a header carries it too: without spaces around it, and not empty.

    Raises:
        ApiError: 400, it is too long or has control characters.
    """
    if name is None:
        return None
    if len(name) > MAX_NAME or not name.isprintable():
        raise invalid(f"{field} has to be a name of at most {MAX_NAME} characters", field)
    return name.strip() or None


def checked_sampling(values: SamplingOptions, *, names: Mapping[str, str]) -> SamplingOptions:
    """Sampling options within their ranges.

    Args:
        values: those that are given.
        names: of options in the API, where they differ.

    Raises:
        ApiError: 400, naming the field.
    """
    temperature = values.get("temperature")
    if temperature is not None and 0 < temperature < 1e-3:
        values["temperature"] = 0.0
    try:
        sampling_params(values)
    except InputError as error:
        field = str(error).partition(" ")[0]
        raise invalid(str(error), names.get(field, field)) from None
    return values
