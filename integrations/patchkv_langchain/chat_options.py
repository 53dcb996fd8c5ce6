"""What a call of the chat model takes besides messages, and what programs call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from patchkv_agents.context import FrozenJson, parse_tools
from patchkv_agents.errors import InputError

SAMPLING = frozenset({"temperature", "top_p", "top_k", "seed"})
"""Sampling that a chat model has settings of; a call may give others."""
STANDARD_SETTINGS = frozenset({"timeout", "max_retries", "api_key"})
"""What LangChain gives to all chat models alike. A model in this process needs none of it."""
_MORE_SAMPLING = frozenset({"min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"})
_OPTIONS = SAMPLING | _MORE_SAMPLING
_OPTIONS |= {"tools", "tool_choice", "parallel_tool_calls", "response_format", "model", "policy"}
_OPTIONS |= {"thread", "max_tokens", "max_completion_tokens", "template_args"}
# What other chat models take, and which changes nothing here: streams are asked for by the method,
# usage always comes, and the user's name goes nowhere.
_WITHOUT_EFFECT = frozenset({"stream", "stream_usage", "stream_options", "user"})


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The arguments of one call, checked. None where the chat model's own setting holds.

    Attributes:
        model: name of another model.
        thread: id of the conversation.
        policy: of the recovery.
        tools: that the model is shown.
        tool_choice: `auto`, `none`, `any` or the name of a tool.
        one_call: at most one call of a tool is wanted.
        response_format: as OpenAI's.
        template_args: of the chat template, beside the chat model's.
        max_tokens: most tokens of the answer.
        sampling: fields of `SamplingParams`.
    """

    model: str | None
    thread: str | None
    policy: Any
    tools: tuple[FrozenJson, ...]
    tool_choice: str
    one_call: bool
    response_format: Any
    template_args: Mapping[str, Any]
    max_tokens: int | None
    sampling: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CallOptions:
        """The options of a call; None means that one is not given.

        Raises:
            InputError: one is unknown, or asks for what cannot be done.
        """
        options = {name: value for name, value in given.items() if value is not None}
        if options.pop("n", 1) != 1:
            raise InputError(f"n is {given['n']!r}: a call gives one answer")
        unknown = sorted(options.keys() - _OPTIONS - _WITHOUT_EFFECT)
        if unknown:
            raise InputError(unknown_arguments(unknown, sorted(_OPTIONS), "a call"))
        limits = [options.get(name) for name in ("max_tokens", "max_completion_tokens")]
        return cls(
            model=options.get("model"),
            thread=options.get("thread"),
            policy=options.get("policy"),
            tools=parse_tools(options.get("tools")),
            tool_choice=options.get("tool_choice", "auto"),
            one_call=options.get("parallel_tool_calls") is False,
            response_format=options.get("response_format"),
            template_args=options.get("template_args", {}),
            max_tokens=min((limit for limit in limits if limit not in (None, -1)), default=None),
            sampling={n: options[n] for n in (SAMPLING | _MORE_SAMPLING) & options.keys()},
        )


def unknown_arguments(unknown: Sequence[str], known: Sequence[str], what: str) -> str:
    """An error text that names unknown arguments, and what may have been meant."""
    close = [match for name in unknown for match in get_close_matches(name, known, 1)]
    meant = f"; did you mean {close}?" if close else ""
    return f"unknown arguments {list(unknown)}{meant} {what} takes {list(known)}"


def tool_choice_of(tool_choice: str | bool | dict[str, Any] | None, names: Sequence[str]) -> str:
    """`auto`, `none`, `any` or the name of a tool, from the forms of OpenAI and Anthropic.

    Raises:
        InputError: there is no tool of the name, or it is another form.
    """
    if isinstance(tool_choice, dict):
        function, kind = tool_choice.get("function"), tool_choice.get("type")
        if isinstance(function, dict):
            tool_choice = str(function.get("name"))
        else:
            tool_choice = str(tool_choice.get("name") if kind == "tool" else kind)
    if tool_choice is None or tool_choice is False:
        return "auto"
    if tool_choice is True or tool_choice == "required":
        return "any"
    if tool_choice not in ("auto", "none", "any", *names):
        raise InputError(
            f"tool_choice is {tool_choice!r}: use 'auto', 'none', 'any' or one of {list(names)}"
        )
    return tool_choice


def wants_one_call(tool_choice: Any) -> bool:
    """Whether Anthropic's form of the choice says that calls may not be side by side."""
    return isinstance(tool_choice, dict) and bool(tool_choice.get("disable_parallel_tool_use"))
