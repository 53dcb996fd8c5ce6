"""Messages from and to the forms of other programs, without loss.

What the other side has no place for travels beside its own fields: LangChain's in
`Message.metadata` under `langchain`, ours in a LangChain message's `additional_kwargs` under
`patchkv`. The latter counts only as long as it says the same as the message's own fields, so that
a message changed by LangChain's means is never changed back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from patchkv_agents.context.frozen import FrozenJson, to_json
from patchkv_agents.context.messages import METADATA_FIELDS, NO_EXTRA, Message, ToolCall
from patchkv_agents.context.parsing import parse_message, parse_messages
from patchkv_agents.errors import ContextError

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

_OWN = "patchkv"
_INVALID = "invalid_tool_call"
_DEVELOPER = {"__openai_role__": "developer"}  # LangChain's own mark
# Fields of messages which an attribute of a LangChain message cannot stand for.
_TAKEN = METADATA_FIELDS | frozenset(
    "role content name id type tool_calls invalid_tool_calls tool_call_id reasoning "
    "reasoning_content function_call refusal additional_kwargs status content_blocks".split()
)


def from_openai(messages: Sequence[Mapping[str, Any] | Message]) -> tuple[Message, ...]:
    """Messages from dicts in OpenAI's form; another name of `parse_messages`.

    Raises:
        ContextError: naming the message's index, the field, and what is expected there.
    """
    return parse_messages(messages)


def to_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Fresh dicts in OpenAI's form, from which `from_openai` makes equal messages."""
    return [message.to_openai() for message in messages]


def from_langchain(
    messages: Sequence[BaseMessage], *, keep: Literal["all", "shown"] = "all"
) -> tuple[Message, ...]:
    """Messages from LangChain's. Chunks become whole messages.

    Reasoning, refusal and the older function call among `additional_kwargs` become fields of the
    message; invalid tool calls become calls. Images and other blocks stay as they are.

    Args:
        messages: LangChain messages. Copied.
        keep: `"all"`, so that `to_langchain` makes equal messages; or `"shown"`, which leaves out
            what the model is not shown: artifacts, response and usage metadata and the like.

    Raises:
        ContextError: naming the message's index and the field: not a message, one that removes
            others, or a value that is not JSON.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ContextError("LangChain messages must be a list of messages.")
    return parse_messages(
        [_from_langchain(message, index, keep) for index, message in enumerate(messages)]
    )


def to_langchain(messages: Sequence[Message]) -> list[BaseMessage]:
    """Fresh LangChain messages, from which `from_langchain` makes equal ones again."""
    return [_to_langchain(message, index) for index, message in enumerate(messages)]


def _from_langchain(message: Any, index: int, keep: str) -> Message:
    from langchain_core.messages import BaseMessage, BaseMessageChunk, RemoveMessage
    from langchain_core.messages.utils import message_chunk_to_message

    if not isinstance(message, BaseMessage):
        raise ContextError(
            f"Message {index}: must be a LangChain message, not {type(message).__name__}; "
            "convert it with langchain_core.messages.convert_to_messages."
        )
    if isinstance(message, RemoveMessage):
        raise ContextError(
            f"Message {index}: a RemoveMessage says that others are removed and is none itself; "
            "apply it first, as langgraph's add_messages does, and pass what remains."
        )
    if isinstance(message, BaseMessageChunk):
        message = message_chunk_to_message(message)
    fields, beside, own = _take_apart(message, index)
    parsed = parse_message(fields, index)
    if keep == "all" and beside:
        try:
            metadata = {**parsed.metadata.load(), "langchain": beside}
            frozen = FrozenJson.of(metadata, f"Message {index}")
        except ContextError as error:
            raise ContextError(
                f"{error} Or pass keep='shown', which leaves out what the model is not shown."
            ) from None
        parsed = replace(parsed, metadata=frozen)
    if isinstance(own, dict):
        parsed = _with_own(parsed, own, index)
    return parsed if keep == "all" else replace(parsed, metadata=NO_EXTRA)


def _take_apart(message: Any, index: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """A message's fields in OpenAI's form, what has no place there, and what we put beside it."""
    beside: dict[str, Any] = {}
    fields: dict[str, Any] = {"role": _role(message, index), "name": message.name, "id": message.id}
    if message.type == "chat":
        beside["type"] = "chat"
    content = message.content
    if isinstance(content, list):
        if plain := [n for n, part in enumerate(content) if isinstance(part, str)]:
            beside["plain_parts"] = plain
        content = [_wrap(part) for part in content]
    fields["content"] = content
    more = dict(message.additional_kwargs)
    if fields["role"] == "developer" and message.type == "system":
        more.pop("__openai_role__")
    if message.type == "ai":
        calls = [*message.tool_calls, *map(_from_invalid, message.invalid_tool_calls)]
        fields["tool_calls"] = calls
        for key, name in (("reasoning_content", "reasoning"), ("refusal", "refusal")):
            if isinstance(more.get(key), str):
                fields[name] = more.pop(key)
        if isinstance(more.get("function_call"), dict) and not calls:
            fields["function_call"] = more.pop("function_call")
        if message.usage_metadata is not None:
            beside["usage_metadata"] = message.usage_metadata
    if message.type == "tool":
        fields["tool_call_id"] = message.tool_call_id
        if message.artifact is not None:
            beside["artifact"] = message.artifact
        if message.status != "success":
            beside["status"] = message.status
    own = more.pop(_OWN, None)
    attributes = dict(message.model_extra or {})
    taken = {key: attributes.pop(key) for key in sorted(_TAKEN & attributes.keys())}
    parts = {
        "additional_kwargs": more,
        "response_metadata": message.response_metadata,
        "attributes": taken,
    }
    beside |= {key: value for key, value in parts.items() if value}
    # What else there is may be shown by a template. Fields that are known go first.
    return {**attributes, **fields}, beside, own


def _role(message: Any, index: int) -> str:
    if message.type == "system":
        is_developer = message.additional_kwargs.get("__openai_role__") == "developer"
        return "developer" if is_developer else "system"
    if message.type == "chat":
        return str(message.role)
    roles = {"human": "user", "ai": "assistant", "tool": "tool", "function": "function"}
    if message.type not in roles:
        raise ContextError(
            f"Message {index}: {type(message).__name__} is not known; use a human, AI, system, "
            "tool, function or chat message."
        )
    return roles[message.type]


def _wrap(part: Any) -> Any:
    """A part of content with a type of its own, as Bedrock's have none."""
    if isinstance(part, str):
        return part
    kind = part.get("type")
    text_is_wrong = kind == "text" and not isinstance(part.get("text"), str)
    if not isinstance(kind, str) or kind == "untyped" or text_is_wrong:
        return {"type": "untyped", "value": part}
    return part


def _from_invalid(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments could not be read, as a raw one."""
    name, arguments = call["name"], call["args"]
    marks = {} if call["error"] is None else {"error": call["error"]}
    # A call here has a name and a text of arguments, which may be empty.
    marks |= {} if name else {"name": name}
    marks |= {} if arguments is not None else {"args": None}
    made: dict[str, Any] = {"id": call["id"], "name": name or _INVALID, "args": arguments or ""}
    is_valid = isinstance(ToolCall("", made["args"], raw=True).parsed_arguments(), dict)
    return {**made, _INVALID: marks} if marks or is_valid else made


def _with_own(message: Message, own: dict[str, Any], index: int) -> Message:
    """With what `to_langchain` put beside the message, as far as that still says the same."""
    native = to_json(_native(message))
    for fields in (own, *({key: value} for key, value in own.items())):
        try:
            candidate = parse_message({**message.to_openai(), **fields}, index)
        except ContextError:  # it was changed, and does not fit the message any more
            continue
        if to_json(_native(candidate)) == native:
            message = candidate
    return message


def _to_langchain(message: Message, index: int) -> BaseMessage:
    native = _native(message)
    made = _make(native)
    back = _from_langchain(made, index, "all")
    if back == message:
        return made
    wanted, got = message.to_openai(), back.to_openai()
    keys = [key for key in {**wanted, **got} if _differ(wanted, got, key)]
    own = {key: wanted.get(key) for key in keys}
    additional = {**native["additional_kwargs"], _OWN: own}
    return _make({**native, "additional_kwargs": additional})


def _differ(a: Mapping[str, Any], b: Mapping[str, Any], key: str) -> bool:
    if (key in a) != (key in b):
        return True
    return to_json(a[key]) != to_json(b[key])


def _native(message: Message) -> dict[str, Any]:
    """Type and arguments of the LangChain message, as far as it has places for what is said."""
    metadata = message.metadata.load()
    beside = metadata.pop("langchain", {})
    types = {"user": "human", "assistant": "ai", "developer": "system"}
    kind = beside.get("type") or types.get(message.role, message.role)
    extra = message.extra.load()
    more: dict[str, Any] = {}
    native: dict[str, Any] = {"type": kind, "name": message.name, "id": message.id}
    native["content"] = _content(message, beside.get("plain_parts", ()))
    if kind == "chat":
        native["role"] = message.role
    if message.role == "developer" and kind == "system":
        more |= _DEVELOPER
    if kind == "function":
        native["name"] = message.name or ""
    if kind == "tool":
        native |= {
            "tool_call_id": message.tool_call_id or "",
            "artifact": beside.get("artifact"),
            "status": beside.get("status") or "success",
        }
    if kind == "ai":
        native["usage_metadata"] = beside.get("usage_metadata")
        if message.reasoning is not None:
            more["reasoning_content"] = message.reasoning
        if isinstance(extra.get("refusal"), str):
            more["refusal"] = extra["refusal"]
        shown = message.to_openai()
        if "function_call" in shown and "function_call" not in extra:
            more["function_call"] = shown["function_call"]
        else:
            calls = [_call(call) for call in message.tool_calls]
            native["tool_calls"] = [c for c in calls if c["type"] == "tool_call"]
            native["invalid_tool_calls"] = [c for c in calls if c["type"] == _INVALID]
    native["additional_kwargs"] = {**beside.get("additional_kwargs", {}), **more}
    native["response_metadata"] = beside.get("response_metadata", {})
    attributes = {key: value for key, value in extra.items() if key not in _TAKEN}
    return {**native, **beside.get("attributes", {}), **attributes}


def _content(message: Message, plain: Sequence[int]) -> str | list[Any]:
    if not isinstance(message.content, tuple):
        return message.content or ""
    parts = [part.load() for part in message.content]
    for number, part in enumerate(parts):
        if part["type"] == "untyped" and part.keys() == {"type", "value"}:
            parts[number] = part["value"]
        elif number in plain and part.keys() == {"type", "text"}:
            parts[number] = part["text"]
    return parts


def _call(call: ToolCall) -> dict[str, Any]:
    marks = call.extra.load().get(_INVALID)
    arguments = call.parsed_arguments()
    if marks is None and isinstance(arguments, dict):
        return {"type": "tool_call", "id": call.id, "name": call.name, "args": arguments}
    invalid = {"type": _INVALID, "id": call.id, "name": call.name, "args": call.arguments_json}
    return {**invalid, "error": None, **(marks if isinstance(marks, dict) else {})}


def _make(native: Mapping[str, Any]) -> BaseMessage:
    from langchain_core import messages as langchain

    types: dict[str, type[BaseMessage]] = {
        "system": langchain.SystemMessage,
        "human": langchain.HumanMessage,
        "ai": langchain.AIMessage,
        "tool": langchain.ToolMessage,
        "function": langchain.FunctionMessage,
        "chat": langchain.ChatMessage,
    }
    arguments = dict(native)
    return types[arguments.pop("type")](**arguments)
