"""A chat model whose prefill, recovery and parsing are real, and whose words are written here."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any

from patchkv_agents.context import FrozenJson, Message
from patchkv_agents.context.answers.arguments import argument_types
from patchkv_agents.engine.reply import StreamChunk
from patchkv_langchain import ChatPatchKV

ARGUMENTS: dict[str, dict[str, Any]] = {
    "magic_function": {"input": 3},
    "my_adder_tool": {"a": 1, "b": 2},
    "get_weather": {"location": "San Francisco, CA"},
    "greeting_generator": {"answer_style": "pirate"},
    "Joke": {"setup": "Why do cats purr?", "punchline": "They know why."},
    "JokeDict": {"setup": "Why do cats purr?", "punchline": "They know why."},
}
Says = Callable[[Sequence[Message], Sequence[FrozenJson], str], str]
"""From messages, tools and the forced beginning to the answer."""


def obliging(messages: Sequence[Message], tools: Sequence[FrozenJson], begin: str) -> str:
    """Calls the first tool, or the one it has to, unless the last message is a tool's result."""
    if begin == "{":
        return json.dumps(ARGUMENTS["Joke"])
    names = list(argument_types(tools))
    if not names or messages[-1].role == "tool":
        return "Hello! How are you?"
    name = next((name for name in names if f'"{name}"' in begin), names[0])
    arguments = ARGUMENTS.get(name, {})
    if name == "unicode_customer":
        arguments = {"customer_name": messages[-1].text.split("'")[1], "description": "x"}
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


class ScriptedChat(ChatPatchKV):
    """Says what `says` returns."""

    says: Says = obliging

    def _replies(
        self, thread: Any, messages: Sequence[Message], **options: Any
    ) -> Generator[StreamChunk, None, None]:
        tokenizer = self.load().tokenizer
        begin = tokenizer.decode(options["begin"])
        text = self.says(messages, options["tools"], begin)
        assert text.startswith(begin)
        ids = tokenizer.encode(text, add_special_tokens=False)
        options["begin"] = [*ids, tokenizer.eos_token_id]
        return super()._replies(thread, messages, **options)
