"""How one tokenizer's model writes its answers, found from its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from patchkv_agents.context.answers.answer import Answer
from patchkv_agents.context.answers.formats import (
    CallFormat,
    Glm4Format,
    GlmFormat,
    HermesFormat,
    LlamaFormat,
    MistralFormat,
    properties_of,
)
from patchkv_agents.context.answers.markers import hidden_tokens, special_tokens
from patchkv_agents.context.answers.parser import AnswerParser, FormatParser
from patchkv_agents.context.answers.template_parser import TemplateParser, response_template
from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.errors import InputError

_FORMATS: dict[str, CallFormat] = {
    call_format.name: call_format
    for call_format in (
        HermesFormat(),
        LlamaFormat(),
        GlmFormat(),
        Glm4Format(),
        MistralFormat(),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class AnswerStyle:
    """How a model writes answers.

    Attributes:
        tokenizer: a Transformers tokenizer.
        call_format: how it writes calls; None if its chat template knows none.
    """

    tokenizer: Any
    call_format: CallFormat | None

    @classmethod
    def of(cls, tokenizer: Any, name: str | None = None) -> AnswerStyle:
        """The style of a tokenizer.

        Args:
            tokenizer: a Transformers tokenizer.
            name: `hermes`, `llama3`, `glm`, `glm4` or `mistral`; found from the chat template if
                left out.

        Raises:
            InputError: there is no style of this name.
        """
        text = _template_text(tokenizer)
        if name is None:
            name = _detect(text)
        elif name not in _FORMATS:
            raise InputError(
                f"there is no answer style {name!r}: use one of {', '.join(_FORMATS)}, or leave "
                "it out to find it from the chat template"
            )
        if name == "mistral" and "[ARGS]" in text:
            return cls(tokenizer, MistralFormat(named=True))
        return cls(tokenizer, None if name is None else _FORMATS[name])

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that have to stay in the text of an answer for it to be taken apart."""
        special = tuple(special_tokens(self.tokenizer).values())
        if response_template(self.tokenizer) is not None:
            return special
        known = (self.call_format or _PLAIN).markers
        return tuple(marker for marker in known if marker in special)

    def parser(
        self,
        tools: Sequence[FrozenJson] = (),
        *,
        template_args: Mapping[str, Any] | None = None,
        salt: str = "",
    ) -> AnswerParser:
        """A parser for one answer.

        Args:
            tools: that the model may call; without any, nothing is a call.
            template_args: of the chat template; they may say whether the model reasons.
            salt: goes into the ids of calls, so that equal calls of several answers differ; an id
                that says what was answered makes them the same at each run.
        """
        prompt = self._prompt(template_args or {})
        call_format = self.call_format or _PLAIN
        template = response_template(self.tokenizer)
        if template is not None:
            return TemplateParser(template, prompt, tools, id_form=call_format.id_form, salt=salt)
        return FormatParser(
            call_format,
            () if self.call_format is None else tools,
            in_reasoning=self._in_reasoning(prompt),
            salt=salt,
        )

    def opening(
        self,
        tools: Sequence[FrozenJson],
        name: str | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """The text with which an answer has to begin to be a call.

        Where the prompt ends within the reasoning, that is ended first.

        Args:
            tools: that the model is shown.
            name: of the one to be called; any of them if left out.
            template_args: of the chat template; they may say whether the model reasons.

        Raises:
            InputError: there is no such tool, or no such text in this style.
        """
        names = list(properties_of(tools))
        if name is not None and name not in names:
            raise InputError(f"there is no tool {name!r} to be called: there are {names}")
        wanted = names if name is None else [name]
        text = None if self.call_format is None or not wanted else self.call_format.opening(wanted)
        if text is None:
            raise InputError(
                "a call cannot be forced with this model's chat template and these tools: name "
                "one tool, or use tool_choice='auto'"
            )
        if self._in_reasoning(self._prompt(template_args or {})):
            return f"{(self.call_format or _PLAIN).thinking[1]}\n\n{text}"
        return text

    def _in_reasoning(self, prompt: str) -> bool:
        return prompt.rstrip().endswith((self.call_format or _PLAIN).thinking[0])

    def _prompt(self, template_args: Mapping[str, Any]) -> str:
        """How prompts end, up to the answer."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": "-"}],
                    tokenize=False,
                    add_generation_prompt=True,
                    **template_args,
                )
            )
        except Exception:  # a template's code fails in many ways; the real prompt will say so
            return ""


_PLAIN = HermesFormat()  # for reasoning, where no calls are known


def parse_answer(
    token_ids: Sequence[int],
    tokenizer: Any,
    tools: Sequence[FrozenJson] = (),
    *,
    template_args: Mapping[str, Any] | None = None,
    style: AnswerStyle | None = None,
    salt: str = "",
) -> Answer:
    """Take a sampled answer apart.

    Args:
        token_ids: as sampled, without the token that ended the turn.
        tokenizer: of the model.
        tools: that it was shown; without any, nothing is a call.
        template_args: with which the prompt was rendered.
        style: the tokenizer's, if left out.
        salt: see `AnswerStyle.parser`.
    """
    style = style or AnswerStyle.of(tokenizer)
    hidden = hidden_tokens(tokenizer, style.markers)
    shown = [int(token) for token in token_ids if int(token) not in hidden]
    text = tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    parser = style.parser(tools, template_args=template_args, salt=salt)
    parser.feed(str(text))
    parser.finish()
    return parser.answer


def _template_text(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def _detect(template: str) -> str | None:
    """Name of the format in which a chat template shows calls."""
    if "<arg_key>" in template:
        return "glm"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama3"
    if "<|observation|>" in template:
        return "glm4"
    return None
