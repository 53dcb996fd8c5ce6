"""From plain dicts and files to messages. Everything is copied, nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

from patchkv_agents.context.frozen import FrozenJson, check_text
from patchkv_agents.context.messages import (
    METADATA_FIELDS,
    NO_EXTRA,
    ROLES,
    Conversation,
    Message,
    ToolCall,
)
from patchkv_agents.errors import ContextError, InputError

_MESSAGE_KEYS = frozenset(
    (
        "role",
        "content",
        "name",
        "tool_call_id",
        "tool_calls",
        "reasoning",
        "reasoning_content",
        "id",
    )
)


def parse_messages(messages: Sequence[Mapping[str, Any] | Message]) -> tuple[Message, ...]:
    """Make immutable messages from dicts.

    Tool calls may have OpenAI's form (`{id, type, function: {name, arguments}}`) or the flat one
    (`{id, name, args}`). Arguments are an object, whose key order counts, or a raw JSON string,
    whose bytes are kept. The older `function_call` is a call too. `reasoning` may also be called
    `reasoning_content`. Fields that are not known are kept in `Message.extra`, those that tell how
    a message came about in `Message.metadata`. Message objects pass through as they are.

    A tool message may answer a call that is not there, and calls may share an id: contexts are cut
    and cleared, and many models number their calls anew each turn. Messages that repeat the id of
    an earlier one, as some frameworks' do, lose it, and an id may be a number. Messages without
    content have an empty one.

    Raises:
        ContextError: naming the message's index, the field, and what is expected there.
    """
    if isinstance(messages, Mapping | str | bytes) or not isinstance(messages, Iterable):
        raise ContextError(f"Messages must be a list of objects, not {_kind(messages)}.")
    given = tuple(messages)
    if set(map(type, given)) <= {Message}:
        parsed = cast("tuple[Message, ...]", given)
    else:
        parsed = tuple(
            message if isinstance(message, Message) else parse_message(message, index)
            for index, message in enumerate(given)
        )
    ids = [message.id for message in parsed if message.id is not None]
    if len(set(ids)) == len(ids):
        return parsed
    first: dict[str, int] = {}
    return tuple(
        message
        if message.id is None or first.setdefault(message.id, index) == index
        else replace(message, id=None)
        for index, message in enumerate(parsed)
    )


def parse_tools(tools: Iterable[Mapping[str, Any] | FrozenJson] | None) -> tuple[FrozenJson, ...]:
    """Freeze tool schemas (a list of objects, in the order in which they are shown).

    Raises:
        ContextError: the list or one of its members has another shape.
    """
    if tools is None:
        return ()
    if isinstance(tools, Mapping | str | bytes) or not isinstance(tools, Iterable):
        raise ContextError(f"Tools must be a list of objects, not {_kind(tools)}.")
    return tuple(
        tool if isinstance(tool, FrozenJson) else _parse_tool(tool, index)
        for index, tool in enumerate(tools)
    )


def load_conversation(path: str | Path) -> Conversation:
    """Read a conversation from a JSON file: `{"messages": [...], "tools": [...]}`, or a bare list.

    Raises:
        InputError: the file cannot be read or is not JSON.
        ContextError: it is JSON of another shape, or holds no messages.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise InputError(f"There is no file {path}. Check the path.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text (byte {error.start}). Save it as UTF-8."
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except RecursionError:
        raise InputError(f"{path} is nested too deeply; flatten its values.") from None
    except ValueError:  # an integer of more digits than Python converts
        raise InputError(
            f"{path} holds a number with thousands of digits; pass it as a string."
        ) from None
    if isinstance(document, dict):
        if "messages" not in document:
            raise ContextError(
                f'{path} has no "messages". Expected {{"messages": [...], "tools": [...]}} '
                f"or a list of messages; found the keys {', '.join(map(repr, document)) or 'none'}."
            )
        messages, tools = document["messages"], document.get("tools")
    else:
        messages, tools = document, None
    try:
        conversation = Conversation(parse_messages(messages), parse_tools(tools))
    except ContextError as error:
        raise ContextError(f"{path}: {error}") from None
    if not conversation.messages:
        raise ContextError(f"{path} has no messages. A context needs at least one.")
    return conversation


def parse_message(message: Any, index: int) -> Message:
    """Make one message, which errors name by its index; as `parse_messages`.

    Raises:
        ContextError: naming the field.
    """
    if not isinstance(message, Mapping):
        raise ContextError(
            f"Message {index}: must be an object with role and content, not {_kind(message)}."
        )
    role = message.get("role")
    if role not in ROLES:
        problem = "is missing" if "role" not in message else f"is {role!r}"
        _fail(index, "role", f"{problem}; must be one of {', '.join(ROLES)}")
    form: dict[str, Any] = {}
    fields = _without(message, *_MESSAGE_KEYS)
    calls = _parse_calls(message.get("tool_calls"), index)
    if not calls and fields.get("function_call") is not None:
        legacy = {"function": fields.pop("function_call")}
        calls = (_parse_call(legacy, f"Message {index}, field 'function_call'"),)
        form["calls"] = "function_call"
    if calls and role != "assistant":
        _fail(index, "tool_calls", f"only an assistant message can call tools, this one is {role}")
    reasoning = _text(message, "reasoning", index)
    reasoning_content = _text(message, "reasoning_content", index)
    if reasoning is None and reasoning_content is not None:
        reasoning = reasoning_content
        form["reasoning"] = ["reasoning_content"]
    elif reasoning_content is not None and reasoning_content == reasoning:
        form["reasoning"] = ["reasoning", "reasoning_content"]
    elif reasoning_content is not None:
        fields["reasoning_content"] = reasoning_content
    content = message.get("content")
    if content is None and role != "assistant":
        content = ""  # of a tool that returns nothing, for instance
    metadata = {key: fields.pop(key) for key in list(fields) if _is_metadata(key, fields[key])}
    if form:
        metadata["form"] = form
    return Message(
        role=role,
        content=parse_content(content, index),
        name=_text(message, "name", index),
        tool_call_id=_id(message, "tool_call_id", index),
        tool_calls=calls,
        reasoning=reasoning,
        id=_id(message, "id", index),
        # In which order a message names its fields says nothing.
        extra=_extra(
            dict(sorted(fields.items(), key=lambda item: str(item[0]))), f"Message {index}"
        ),
        metadata=_extra(
            dict(sorted(metadata.items(), key=lambda item: str(item[0]))), f"Message {index}"
        ),
    )


def _is_metadata(key: str, value: Any) -> bool:
    if key in ("metadata", "langchain"):
        return isinstance(value, Mapping)
    return key in METADATA_FIELDS


def parse_content(content: Any, index: int) -> str | tuple[FrozenJson, ...] | None:
    """The content of message `index`, frozen: text, a tuple of parts, or None.

    Raises:
        ContextError: it has another shape.
    """
    where = f"Message {index}, field 'content'"
    if content is None:
        return None
    if isinstance(content, str):
        check_text(content, where)
        return content
    if not isinstance(content, list | tuple):
        raise ContextError(f"{where}: must be text, a list of parts or null, not {_kind(content)}.")
    parts = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if isinstance(part, FrozenJson):
            parts.append(part)
            continue
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise ContextError(f'{place}: must be an object with a "type" (or a string).')
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise ContextError(f'{place}: a part of type "text" needs "text", a string.')
        parts.append(FrozenJson.of(dict(part), place))
    return tuple(parts)


def _parse_calls(calls: Any, index: int) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list | tuple):
        _fail(index, "tool_calls", f"must be a list of calls, not {_kind(calls)}")
    return tuple(
        _parse_call(call, f"Message {index}, field 'tool_calls[{number}]'")
        for number, call in enumerate(calls)
    )


def _parse_call(call: Any, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    if not isinstance(call, Mapping):
        raise ContextError(f"{where}: must be an object, not {_kind(call)}.")
    if "function" in call:
        function = call["function"]
        if not isinstance(function, Mapping):
            raise ContextError(f"{where}.function: must be an object, not {_kind(function)}.")
        name, arguments = function.get("name"), function.get("arguments")
        extra = _without(call, "id", "type", "function")
        if inner := _without(function, "name", "arguments"):
            extra["function"] = inner
    else:
        key = "args" if "args" in call else "arguments"
        name, arguments = call.get("name"), call.get(key)
        extra = _without(call, "id", "type", "name", key)
    if not isinstance(name, str) or not name:
        raise ContextError(
            f"{where}: needs the name of the tool, as in "
            '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}} '
            'or {"id": ..., "name": ..., "args": ...}.'
        )
    check_text(name, f"{where}.name")
    kind = call.get("type", "function")
    if kind not in ("function", "tool_call"):
        raise ContextError(f"{where}.type: {kind!r} is not known; only functions can be called.")
    call_id = call.get("id")
    call_id = str(call_id) if isinstance(call_id, int | float) else call_id
    if call_id is not None and not isinstance(call_id, str):
        raise ContextError(f"{where}.id: must be a string, not {_kind(call_id)}.")
    check_text(call_id or "", f"{where}.id")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, str | Mapping):  # a list, for instance, which templates refuse
        arguments = FrozenJson.of(arguments, f"{where}.arguments").text
    frozen_extra = _extra(extra, where)
    if isinstance(arguments, str):
        check_text(arguments, f"{where}.arguments")
        return ToolCall(name, arguments, raw=True, id=call_id, extra=frozen_extra)
    frozen = FrozenJson.of(dict(arguments), f"{where}.arguments")
    return ToolCall(name, frozen.text, id=call_id, extra=frozen_extra)


def _parse_tool(tool: Any, index: int) -> FrozenJson:
    if not isinstance(tool, Mapping):
        raise ContextError(f"Tool {index}: must be a schema object, not {_kind(tool)}.")
    schema = _without(tool, "cache_control")  # moves, and is nothing that a model is shown
    if isinstance(schema.get("function"), Mapping):
        schema["function"] = _without(schema["function"], "cache_control")
    return FrozenJson.of(schema, f"Tool {index}")


def _without(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def _extra(extra: dict[str, Any], where: str) -> FrozenJson:
    return FrozenJson.of(extra, where) if extra else NO_EXTRA


def _text(message: Mapping[str, Any], key: str, index: int) -> str | None:
    value = message.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        _fail(index, key, f"must be a string, not {_kind(value)}")
    check_text(value, f"Message {index}, field {key!r}")
    return value


def _id(message: Mapping[str, Any], key: str, index: int) -> str | None:
    """As `_text`; numbers are taken too."""
    value = message.get(key)
    return str(value) if isinstance(value, int | float) else _text(message, key, index)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {"dict": "an object", "list": "a list", "str": "a string", "int": "a number"}
    names |= {"float": "a number", "bool": "a boolean"}
    return names.get(type(value).__name__, type(value).__name__)


def _fail(index: int, key: str, problem: str) -> NoReturn:
    raise ContextError(f"Message {index}, field {key!r}: {problem}.")


def parse_template_args(arguments: Mapping[str, Any] | FrozenJson | None) -> FrozenJson:
    """Copy the arguments of a chat template.

    Raises:
        ContextError: they are not an object, or not JSON.
    """
    if isinstance(arguments, FrozenJson):
        return arguments
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ContextError("template_args must be an object, such as {'enable_thinking': False}.")
    return FrozenJson.of(dict(arguments or {}), "template_args")
