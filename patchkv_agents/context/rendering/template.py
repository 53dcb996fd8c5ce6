"""Runs a tokenizer's chat template, in the form of messages which that template understands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.context.messages import Message, ToolCall
from patchkv_agents.errors import ContextError, InputError

# Called with (message index, field, text) for each text that goes into the template; gives back
# the text to put there. Tools have the index -1.
Visit = Callable[[int, str, str], str]

_RESERVED = frozenset(
    "conversation tools documents chat_template add_generation_prompt continue_final_message "
    "tokenize padding truncation max_length return_tensors return_dict tokenizer_kwargs "
    "return_assistant_tokens_mask sanitize_control_tokens messages".split()
)


@dataclass(frozen=True, slots=True)
class TemplateForms:
    """Which forms of messages a template understands, found by trying.

    Attributes:
        parts: content may be a list of parts; otherwise text parts are joined.
        raw_arguments: arguments may be a JSON string, which is shown as it is.
        object_arguments: arguments may be an object.
    """

    parts: bool
    raw_arguments: bool
    object_arguments: bool


class ChatTemplate:
    """The chat template of one tokenizer.

    Raises:
        InputError: the tokenizer has none.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise InputError(
                f"The tokenizer {name} has no chat template, so messages cannot be rendered. "
                "Pass a chat (instruct) model, or set tokenizer.chat_template."
            )
        self._tokenizer = tokenizer
        self.forms = _forms_of(tokenizer)

    def apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[FrozenJson],
        template_args: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        visit: Visit,
    ) -> str:
        """Render a context to text; `visit` may replace each text that goes in.

        Raises:
            InputError: the template refuses the messages; with its own words.
            ContextError: a template argument has a reserved name, or content cannot be shown.
        """
        if taken := _RESERVED.intersection(template_args):
            raise ContextError(f"template_args cannot set {', '.join(sorted(taken))}.")
        chat = [self._message(message, i, visit) for i, message in enumerate(messages)]
        schemas = [
            _visit_json(tool.load(), -1, f"tools[{n}]", visit) for n, tool in enumerate(tools)
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                chat,
                tools=schemas or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_args,
            )
        except Exception as error:  # jinja2's errors, and whatever the template's code runs into
            raise InputError(
                f"The model's chat template refuses these messages: {error}. "
                "Change the messages, or pass template_args that allow them."
            ) from error
        return str(text)

    def _message(self, message: Message, index: int, visit: Visit) -> dict[str, Any]:
        chat: dict[str, Any] = {
            key: _visit_json(value, index, key, visit)
            for key, value in message.extra.load().items()
        }
        chat["role"] = message.role
        # Never None: many templates add content to text without looking.
        chat["content"] = self._content(message, index, visit)
        reasoning = _reasoning(message)
        if reasoning is not None:
            # Two names are in use in templates.
            reasoning = visit(index, "reasoning", reasoning)
            chat["reasoning_content"] = chat["thinking"] = reasoning
        for key in ("name", "tool_call_id"):
            if (value := getattr(message, key)) is not None:
                chat[key] = visit(index, key, value)
        if message.tool_calls:
            chat["tool_calls"] = [
                self._call(call, index, f"tool_calls[{n}]", visit)
                for n, call in enumerate(message.tool_calls)
            ]
        return chat

    def _content(self, message: Message, index: int, visit: Visit) -> Any:
        if not isinstance(message.content, tuple):
            text = message.content or ""
            inline = _inline_reasoning(text) if message.role == "assistant" else None
            if inline is None:
                return visit(index, "content", text)
            # The model wrote these tags itself, as control tokens: they are none of its text.
            opening, reasoning, closing, rest = inline
            reasoning = visit(index, "reasoning", reasoning)
            return opening + reasoning + closing + visit(index, "content", rest)
        parts = [part.load() for part in message.content]
        shown = []
        for number, part in enumerate(parts):
            if part["type"] == "text":
                shown.append((number, part))
            elif not _is_shown_elsewhere(message, part["type"]):
                raise ContextError(
                    f"Message {index}, field 'content[{number}]': a part of type {part['type']!r} "
                    "cannot be rendered; only text can. Replace it by text."
                )
        if not self.forms.parts:
            return visit(index, "content", message.text)
        return [
            {**part, "text": visit(index, f"content[{number}]", part["text"])}
            for number, part in shown
        ]

    def _call(self, call: ToolCall, index: int, field: str, visit: Visit) -> dict[str, Any]:
        arguments: Any = call.arguments
        forms = self.forms
        # Where the template is known to take neither form, it gets what the caller gave.
        if isinstance(arguments, str) and forms.object_arguments and not forms.raw_arguments:
            parsed = call.parsed_arguments()
            arguments = parsed if isinstance(parsed, dict) else arguments
        elif isinstance(arguments, dict) and forms.raw_arguments and not forms.object_arguments:
            arguments = call.arguments_json
        result = {
            "type": "function",
            "function": {
                "name": visit(index, f"{field}.name", call.name),
                "arguments": _visit_json(arguments, index, f"{field}.arguments", visit),
            },
        }
        return result if call.id is None else {"id": call.id, **result}


# Parts in which some programs say again, beside the text, what the model reasoned and called.
_REASONING_PARTS = {"reasoning": "reasoning", "thinking": "thinking"}
_CALL_PARTS = ("tool_call", "invalid_tool_call", "tool_use", "function_call")


def _is_shown_elsewhere(message: Message, kind: str) -> bool:
    """Whether a part of this type is shown as reasoning or as a call, and so not as content."""
    if message.role != "assistant":
        return False
    return kind in _REASONING_PARTS or (kind in _CALL_PARTS and bool(message.tool_calls))


def _reasoning(message: Message) -> str | None:
    """The reasoning of a message, which may be among the parts of its content."""
    if message.reasoning is not None or not isinstance(message.content, tuple):
        return message.reasoning
    if message.role != "assistant":
        return None
    parts = [part.load() for part in message.content]
    texts = [part.get(_REASONING_PARTS.get(part["type"], "")) for part in parts]
    found = [text for text in texts if isinstance(text, str) and text]
    return "\n".join(found) if found else None


def _inline_reasoning(text: str) -> tuple[str, str, str, str] | None:
    """Opening tag, reasoning, closing tag and answer of a model's own text, if it begins so.

    Some templates put the opening tag into the prompt, so that the answer lacks it: then the
    closing one must end its line, which tells it from one that is quoted.
    """
    head, closing, rest = text.partition("</think>")
    before, opening, reasoning = head.partition("<think>")
    if not closing:
        return None
    if opening and not before.strip():
        return before + opening, reasoning, closing, rest
    return ("", head, closing, rest) if not opening and rest.startswith("\n") else None


def _visit_json(value: Any, index: int, field: str, visit: Visit) -> Any:
    if isinstance(value, str):
        return visit(index, field, value)
    if isinstance(value, list):
        return [_visit_json(item, index, f"{field}[{n}]", visit) for n, item in enumerate(value)]
    if isinstance(value, dict):
        return {
            visit(index, f"{field} key", key): _visit_json(item, index, f"{field}.{key}", visit)
            for key, item in value.items()
        }
    return value


_forms: WeakKeyDictionary[Any, tuple[Any, TemplateForms]] = WeakKeyDictionary()


def _forms_of(tokenizer: Any) -> TemplateForms:
    known = _forms.get(tokenizer)
    if known is None or known[0] != tokenizer.chat_template:
        known = (tokenizer.chat_template, _probe(tokenizer))
        _forms[tokenizer] = known
    return known[1]


def _probe(tokenizer: Any) -> TemplateForms:
    """Try the forms on a small conversation."""

    def render(content: Any, arguments: Any) -> str:
        function = {"name": "probe", "arguments": arguments}
        calls = [{"id": "abcdefghi", "type": "function", "function": function}]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "probe", "content": "1"}
        chat = [{"role": "user", "content": content}]
        if arguments is not None:
            chat += [answer, result]
        try:
            return str(tokenizer.apply_chat_template(chat, tokenize=False))
        except Exception:  # a template fails in many ways on what it does not understand
            return ""

    parts = render([{"type": "text", "text": "pr0be"}], None)
    raw = render("x", '{"pr0be":   1}')
    objects = render("x", {"pr0be": 1})
    return TemplateForms(
        parts="pr0be" in parts and "'text'" not in parts and '"text"' not in parts,
        raw_arguments='{"pr0be":   1}' in raw,
        # A template that joins strings fails on an object, or shows it as Python does.
        object_arguments="pr0be" in objects and "'pr0be'" not in objects,
    )
