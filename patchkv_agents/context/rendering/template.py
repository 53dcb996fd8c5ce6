"""Runs a tokenizer's chat template, in the form of messages which that template understands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from patchkv_agents.context.frozen import FrozenJson, to_json
from patchkv_agents.context.messages import Message, ToolCall, part_text
from patchkv_agents.context.rendering.forms import apply_template, forms_of
from patchkv_agents.errors import ContextError, InputError, TemplateError

RAW_TEXT = "raw_text"
"""Template argument with which no template is applied: the prompt is the text of the messages."""

# Called with (message index, field, text) for each text that goes into the template; gives back
# the text to put there. Tools have the index -1.
Visit = Callable[[int, str, str], str]

_RESERVED = frozenset(
    "conversation tools documents chat_template add_generation_prompt continue_final_message "
    "tokenize padding truncation max_length return_tensors return_dict tokenizer_kwargs "
    "return_assistant_tokens_mask sanitize_control_tokens messages".split()
)


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
        self.forms = forms_of(tokenizer)

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
            TemplateError: the template refuses the messages; with its own words.
            ContextError: a template argument has a reserved name, or content cannot be shown.
        """
        if template_args.get(RAW_TEXT):
            return "".join(message.text for message in messages)
        if taken := _RESERVED.intersection(template_args):
            raise ContextError(f"template_args cannot set {', '.join(sorted(taken))}.")
        chat = [
            shown
            for i, message in enumerate(messages)
            for shown in self._messages(message, i, visit)
        ]
        schemas = [
            _visit_json(tool.load(), -1, f"tools[{n}]", visit) for n, tool in enumerate(tools)
        ]
        try:
            return apply_template(
                self._tokenizer,
                chat,
                with_nulls=self.forms.null_content,
                tools=schemas or None,
                add_generation_prompt=add_generation_prompt,
                **template_args,
            )
        except Exception as error:  # jinja2's errors, and whatever the template's code runs into
            raise TemplateError(
                f"The model's chat template refuses these messages: {error}. "
                "Change the messages, or pass template_args that allow them."
            ) from error

    def _messages(self, message: Message, index: int, visit: Visit) -> list[dict[str, Any]]:
        """A message in the template's form: one, or several where it takes one call in each."""
        chat: dict[str, Any] = {
            key: _visit_json(value, index, key, visit)
            for key, value in message.extra.load().items()
        }
        chat["role"] = self.forms.roles.get(message.role, message.role)
        # Never None where that is not needed: many templates add content to text without looking.
        empty = None if message.tool_calls and self.forms.null_content else ""
        has_content = bool(message.content) or empty == ""
        chat["content"] = self._content(message, index, visit) if has_content else empty
        reasoning = _reasoning(message)
        if reasoning:
            # Two names are in use in templates.
            reasoning = visit(index, "reasoning", reasoning)
            chat["reasoning_content"] = chat["thinking"] = reasoning
        for key in ("name", "tool_call_id"):
            if (value := getattr(message, key)) is not None:
                value = self._id(value) if key == "tool_call_id" else value
                chat[key] = visit(index, key, value)
        calls = [
            self._call(call, index, f"tool_calls[{n}]", visit)
            for n, call in enumerate(message.tool_calls)
        ]
        if not calls:
            return [chat]
        text = []
        if self.forms.text_apart and message.text.strip():
            text, chat = [chat], {"role": chat["role"], "content": empty}
        each = [[call] for call in calls] if self.forms.one_call else [calls]
        rest = ({"role": chat["role"], "content": empty, "tool_calls": one} for one in each[1:])
        return [*text, {**chat, "tool_calls": each[0]}, *rest]

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
        shown = []
        for number, part in enumerate(part.load() for part in message.content):
            shown_text = _shown_text(message, part)
            if shown_text is None:
                raise ContextError(
                    f"Message {index}, field 'content[{number}]': a part of type {part['type']!r} "
                    "cannot be rendered; only text can. Replace it by text."
                )
            if shown_text is not _ELSEWHERE:
                shown.append((number, shown_text))
        if not self.forms.parts or len(shown) == 1:
            return visit(index, "content", "\n".join(text for _, text in shown))
        return [
            {"type": "text", "text": visit(index, f"content[{number}]", text)}
            for number, text in shown
        ]

    def _call(self, call: ToolCall, index: int, field: str, visit: Visit) -> dict[str, Any]:
        arguments = _object_arguments(call)
        forms = self.forms
        # Where the template is known to take neither form, it gets what the caller gave.
        if isinstance(arguments, str) and forms.object_arguments and not forms.raw_arguments:
            arguments = call.parsed_arguments()
        elif isinstance(arguments, dict) and forms.raw_arguments and not forms.object_arguments:
            arguments = to_json(arguments)
        result = {
            "type": "function",
            "function": {
                "name": visit(index, f"{field}.name", call.name),
                "arguments": _visit_json(arguments, index, f"{field}.arguments", visit),
            },
        }
        return result if call.id is None else {"id": self._id(call.id), **result}

    def _id(self, call_id: str) -> str:
        """An id of a call as the template takes it."""
        if not self.forms.short_ids or re.fullmatch("[A-Za-z0-9]{9}", call_id):
            return call_id
        return blake2b(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def notes(messages: Sequence[Message]) -> Iterator[str]:
    """What a template is shown in another form than the messages have, in words."""
    for index, message in enumerate(messages):
        for call in message.tool_calls:
            if (
                call.raw
                and call.arguments_json.strip()
                and _object_arguments(call) is not call.arguments_json
            ):
                yield f"message {index}: arguments that are not a JSON object are shown as one"
        if message.role in _RESULTS and isinstance(message.content, tuple):
            for part in (part.load() for part in message.content):
                if part_text(part) is None:
                    kind = part["type"][:_MAX_KIND]
                    yield f"message {index}: a part of type {kind!r} in a result is left out"


def _object_arguments(call: ToolCall) -> str | dict[str, Any]:
    """The arguments in the caller's form, but as an object if they are none."""
    arguments = call.arguments
    if isinstance(arguments, dict):
        return arguments
    parsed = call.parsed_arguments()
    if isinstance(parsed, dict):
        return arguments
    return {} if parsed is None or not arguments.strip() else {"arguments": arguments}


_RESULTS = ("tool", "function")
_MAX_KIND = 40
_ELSEWHERE = "\0"  # stands for a part that is shown as reasoning or as a call


def _shown_text(message: Message, part: Mapping[str, Any]) -> str | None:
    """What is shown of a part of content; None if nothing can be."""
    text = part_text(part)
    if text is None and _is_shown_elsewhere(message, part["type"]):
        return _ELSEWHERE
    if text is None and message.role in _RESULTS:  # the conversation has to go on
        return f"[{part['type']} left out: only text can be shown]"
    return text


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
