"""How one tokenizer's model writes its answers, found from its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from patchkv_agents.context.answers.answer import Answer
from patchkv_agents.context.answers.arguments import argument_types
from patchkv_agents.context.answers.formats import (
    FORMATS,
    CallFormat,
    HarmonyFormat,
    HarmonyParser,
    JsonFormat,
    detect_format,
)
from patchkv_agents.context.answers.markers import hidden_tokens, special_tokens
from patchkv_agents.context.answers.parser import AnswerParser, FormatParser
from patchkv_agents.context.answers.template_parser import TemplateParser, response_template
from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.errors import InputError


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
            name: of a format (see `FORMATS`); found from the chat template if left out.

        Raises:
            InputError: there is no style of this name.
        """
        if name is None:
            return cls(tokenizer, detect_format(_template_text(tokenizer)))
        if name not in FORMATS:
            raise InputError(
                f"there is no answer style {name!r}: use one of {', '.join(FORMATS)}, or leave "
                "it out to find it from the chat template"
            )
        detected = detect_format(_template_text(tokenizer))
        same = detected is not None and detected.name == name
        return cls(tokenizer, detected if same else FORMATS[name])

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
        types = {} if self.call_format is None else argument_types(tools)
        if isinstance(call_format, HarmonyFormat):
            return HarmonyParser(types, prompt=prompt, salt=salt)
        return FormatParser(
            call_format,
            types,
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
        names = list(argument_types(tools))
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
        return prompt.rstrip().endswith((self.call_format or _PLAIN).thinking[0].rstrip())

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


_PLAIN = JsonFormat()  # for reasoning, where no calls are known


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
