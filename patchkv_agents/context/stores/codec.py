"""Lossless JSON encoding of messages and edits, as stores write them.

Text is neither escaped to ASCII nor compressed, so that a search through the bytes of a file shows
whether a text is in it.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, TypeVar

from patchkv_agents.context.edits import Edit, EditKind
from patchkv_agents.context.frozen import FrozenJson, to_json
from patchkv_agents.context.messages import Message, ToolCall
from patchkv_agents.context.versions import Forgotten, ThreadKey

R = TypeVar("R", Message, ToolCall, Edit)


def encode_message(message: Message) -> str:
    """A message as JSON text, without the fields that have their default."""
    value = _plain(message)
    if isinstance(message.content, tuple):
        value["content"] = [part.text for part in message.content]
    if message.tool_calls:
        value["tool_calls"] = [_plain(call) for call in message.tool_calls]
    return to_json(value)


def decode_message(text: str) -> Message:
    """The message of which `encode_message` made `text`."""
    value = json.loads(text)
    if isinstance(value.get("content"), list):
        value["content"] = tuple(map(FrozenJson, value["content"]))
    if "tool_calls" in value:
        value["tool_calls"] = tuple(_made(ToolCall, call) for call in value["tool_calls"])
    return _made(Message, value)


def encode_edit(edit: Edit) -> dict[str, Any]:
    """An edit as a JSON object, without the fields that have their default."""
    return _plain(edit)


def decode_edit(value: dict[str, Any]) -> Edit:
    """The edit of which `encode_edit` made `value`."""
    lists = {key: tuple(item) for key, item in value.items() if isinstance(item, list)}
    return _made(Edit, {**value, **lists, "kind": EditKind(value["kind"])})


def encode_forgotten(forgotten: Forgotten) -> dict[str, Any]:
    """A record of forgotten text as a JSON object, without the status, which a store tracks."""
    return {
        "messages": forgotten.messages,
        "versions": forgotten.versions,
        "threads": [[key.thread, key.namespace] for key in forgotten.threads],
        "hashes": forgotten.hashes,
        "still_shown": forgotten.still_shown,
    }


def decode_forgotten(value: dict[str, Any]) -> Forgotten:
    """What `encode_forgotten` made `value` of; its status is the default."""
    return Forgotten(
        messages=value["messages"],
        versions=tuple(value["versions"]),
        threads=tuple(ThreadKey(*names) for names in value["threads"]),
        hashes=value["hashes"],
        still_shown=tuple(value["still_shown"]),
    )


def _plain(record: Message | ToolCall | Edit) -> dict[str, Any]:
    """The fields that do not have their default; frozen JSON as its text, byte for byte."""
    values = ((field, getattr(record, field.name)) for field in fields(record) if field.init)
    return {
        field.name: value.text if isinstance(value, FrozenJson) else value
        for field, value in values
        if value != field.default
    }


def _made(kind: type[R], value: dict[str, Any]) -> R:
    """The record of which `_plain` made `value`, its lists being tuples again."""
    frozen = {
        field.name: FrozenJson(value[field.name])
        for field in fields(kind)
        if isinstance(field.default, FrozenJson) and field.name in value
    }
    return kind(**{**value, **frozen})
