"""Forms of messages that a chat template understands, found by trying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

_ID = "abcdefghi"
_LONG_ID = "call_0123456789abcdef"
_USER = {"role": "user", "content": "x"}
_TOOL = {
    "type": "function",
    "function": {"name": "pr0be", "description": "x", "parameters": {"type": "object"}},
}


@dataclass(frozen=True, slots=True)
class TemplateForms:
    """Forms of messages that a template understands.

    Attributes:
        parts: content may be a list of parts; otherwise text parts are joined.
        raw_arguments: arguments may be a JSON string, which is shown as it is.
        object_arguments: arguments may be an object.
        roles: role to pass in place of another one that the template leaves out or refuses.
        null_content: calls are shown only where the content is null.
        one_call: several calls have to be messages of their own.
        text_apart: text beside a call has to be one.
        tools: they are shown.
        calls: they are shown.
        short_ids: ids of calls have to be nine letters and digits.
    """

    parts: bool
    raw_arguments: bool
    object_arguments: bool
    roles: Mapping[str, str]
    null_content: bool
    one_call: bool
    text_apart: bool
    tools: bool
    calls: bool
    short_ids: bool


def apply_template(
    tokenizer: Any,
    chat: Sequence[Mapping[str, Any]],
    *,
    with_nulls: bool = False,
    tools: Sequence[Any] | None = None,
    **arguments: Any,
) -> str:
    """The text that a tokenizer's chat template makes of a conversation.

    Args:
        tokenizer: a Transformers tokenizer with a chat template.
        chat: messages in the template's form.
        with_nulls: fields that are None stay there; the tokenizer itself takes them away.
        tools: schemas.
        arguments: of the template.
    """
    if not with_nulls:
        return str(tokenizer.apply_chat_template([*chat], tools=tools, tokenize=False, **arguments))
    from transformers.utils import chat_template_utils

    rendering: Any = chat_template_utils.render_jinja_template
    rendered, _ = rendering(
        conversations=[list(chat)],
        tools=tools,
        chat_template=tokenizer.get_chat_template(None, tools),
        **{**tokenizer.special_tokens_map, **arguments},
    )
    return str(rendered[0])


_forms: WeakKeyDictionary[Any, tuple[Any, TemplateForms]] = WeakKeyDictionary()


def forms_of(tokenizer: Any) -> TemplateForms:
    """The forms of a tokenizer's template, which is tried once."""
    known = _forms.get(tokenizer)
    if known is None or known[0] != tokenizer.chat_template:
        known = (tokenizer.chat_template, _probe(tokenizer))
        _forms[tokenizer] = known
    return known[1]


def _calls(names: Sequence[str], arguments: Any, call_id: str = _ID) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{call_id[:-1]}{number}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, name in enumerate(names)
    ]


def _results(calls: Sequence[Mapping[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    result = {"role": "tool", "name": "f", "content": "1", **fields}
    return [{**result, "tool_call_id": call["id"]} for call in calls]


def _probe(tokenizer: Any) -> TemplateForms:
    """Try the forms on a small conversation."""

    def render(*chat: Mapping[str, Any], tools: Any = None) -> str:
        with_nulls = any(message["content"] is None for message in chat)
        try:
            return apply_template(tokenizer, chat, with_nulls=with_nulls, tools=tools)
        except Exception:  # a template fails in many ways on what it does not understand
            return ""

    def shown(*chat: Mapping[str, Any], text: str = "pr0be") -> bool:
        return text in render(_USER, *chat)

    def first(role: str) -> bool:
        return "pr0be" in render({"role": role, "content": "pr0be"}, _USER)

    def called(content: str | None, arguments: Any, call_id: str = _ID) -> list[dict[str, Any]]:
        calls = _calls(("pr0be",), arguments, call_id)
        return [{"role": "assistant", "content": content, "tool_calls": calls}, *_results(calls)]

    def shows_calls(content: str | None) -> bool:
        return shown(*called(content, {})) or shown(*called(content, "{}"))

    null_content = not shows_calls("") and shows_calls(None)
    empty = None if null_content else ""
    is_shown = shows_calls(empty)
    parts = render({"role": "user", "content": [{"type": "text", "text": "pr0be"}]})
    raw = render(_USER, *called(empty, '{"m4rk":   1}'))
    objects = render(_USER, *called(empty, {"m4rk": 1}))
    # A template that joins strings fails on an object, or shows it as Python does.
    object_arguments = "m4rk" in objects and "'m4rk'" not in objects
    arguments: Any = {} if object_arguments else "{}"
    roles = {}
    if not first("developer") and first("system"):
        roles["developer"] = "system"
    turn = called(empty, arguments)
    with_role = {
        role: shown(turn[0], {**turn[1], "role": role, "content": "t3xt"}, text="t3xt")
        for role in ("tool", "function")
    }
    if with_role["tool"] and not with_role["function"]:
        roles["function"] = "tool"
    calls = _calls(("f", "pr0be"), arguments)
    cut: list[dict[str, Any]] = [
        {"role": "assistant", "content": empty, "tool_calls": [call]} for call in calls
    ]
    many = {"role": "assistant", "content": empty, "tool_calls": calls}
    text = {"role": "assistant", "content": "t3xt"}
    one_call = not shown(many, *_results(calls)) and shown(*cut, *_results(calls))
    beside = [{**cut[1], "content": "t3xt"}, *_results(calls[1:])]
    apart = [text, cut[1], *_results(calls[1:])]
    is_hidden = not (shown(*beside) and shown(*beside, text="t3xt"))
    return TemplateForms(
        parts="pr0be" in parts and "'text'" not in parts and '"text"' not in parts,
        raw_arguments='{"m4rk":   1}' in raw,
        object_arguments=object_arguments,
        roles=roles,
        null_content=null_content,
        one_call=one_call,
        text_apart=is_hidden and shown(*apart) and shown(*apart, text="t3xt"),
        tools="pr0be" in render(_USER, tools=[_TOOL])
        or "pr0be" in render({"role": "system", "content": "x"}, _USER, tools=[_TOOL]),
        calls=is_shown,
        short_ids=is_shown and not shown(*called(empty, arguments, _LONG_ID)),
    )
