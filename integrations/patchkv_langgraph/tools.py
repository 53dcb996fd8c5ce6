"""Tools that change what earlier messages say."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Literal

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.prebuilt import ToolRuntime
from langgraph.types import Command

from patchkv_agents.context import EditKind
from patchkv_agents.errors import InputError
from patchkv_langgraph.marks import EditMark, edit_kind, mark_of, marked
from patchkv_langgraph.notices import warn
from patchkv_langgraph.signatures import with_keyword
from patchkv_langgraph.tasks import messages_in

Replaces = Callable[[Any, Mapping[str, Any]], Iterable[str] | str | None] | str | None
"""What a tool's result takes the place of; see `context_tool`."""

_ANSWER = "The earlier result of this call was brought up to date."
_ANSWERS = "patchkv_answer"
"""Field of `response_metadata` that marks an answer which stands for a result elsewhere."""
_REWRITING = "patchkv_rewriting"
"""Attribute of a decorated function: how its results take the place of others."""


def context_tool(
    tool: Any = None,
    *,
    replaces: Replaces = "previous",
    match: Literal["arguments", "name"] = "arguments",
    kind: EditKind | str = EditKind.REPLACE_TOOL_RESULT,
    answer: str = _ANSWER,
    author: str | None = None,
    messages_key: str = "messages",
) -> Any:
    """Declare that a tool's result takes the place of an earlier message.

    A decorator for a tool or its function, above `@tool` or below. Run by a `ToolNode`, the tool
    then answers with a `Command` that gives the earlier message the new content, under the same
    ids, and answers the present call with a short text; where there is nothing to replace, with the
    result as always. The edit is marked on the message (`patchkv_langgraph.marks`), so that a
    tracked `ToolNode` or a chat model can declare it. Of a tool that returns a `Command` of its
    own, the messages are marked that this one replaces, and nothing else is done.

    An error takes no message's place and is not replaced itself. Of the calls of one message of the
    model, which may run at the same time, each message is replaced by one at most, the first that
    means it; what is left to replace nothing answers with its result.

    Below `@tool`, the function gets a parameter `runtime`, which ToolNode fills in and no model
    sees; a tool with `response_format="content_and_artifact"` must be decorated above.

    Args:
        tool: a function, a coroutine function, or a tool made of one.
        replaces: `"previous"`, this tool's last result for the same call; the id or tool_call_id of
            a message; a function of the state and the call's arguments that returns such an id,
            several, or None; or None for tools that return commands. A message that is not there
            is not replaced. Where the function fails, nothing is replaced, and a warning says so.
        match: whether calls of this tool are the same with equal arguments, or always.
        kind: what the edit is.
        answer: content of the answer to the present call.
        author: name for the edit; the tool's name if left out.
        messages_key: the messages' key in the state.

    Raises:
        InputError: it is no function, and no tool that is made of one; or `replaces` or `match` is
            none of the above.
        ContextError: there is no such kind.
    """
    if match not in ("arguments", "name"):
        raise InputError(f"match is {match!r}: use 'arguments' or 'name'.")
    if not (replaces is None or isinstance(replaces, str) or callable(replaces)):
        raise InputError(f"replaces is {replaces!r}: give an id, a function, 'previous' or None.")
    how = _Rewriting(replaces, match, edit_kind(kind), answer, author, messages_key)
    if tool is None:
        return partial(_decorated, how=how)
    return _decorated(tool, how=how)


def _decorated(tool: Any, *, how: _Rewriting) -> Any:
    if isinstance(tool, StructuredTool):
        how = replace(how, has_artifact=tool.response_format == "content_and_artifact")
        run = tool.func and _rewriting(tool.func, how)
        arun = tool.coroutine and _rewriting(tool.coroutine, how)
        return tool.model_copy(update={"func": run, "coroutine": arun})
    if isinstance(tool, BaseTool) or not inspect.isroutine(tool):
        raise InputError(
            f"{tool!r} is no function: decorate the function of the tool, or a tool made by @tool."
        )
    return _rewriting(tool, how)


@dataclass(frozen=True, slots=True)
class _Rewriting:
    """How a tool's results take the place of others; fields as the arguments of `context_tool`."""

    replaces: Replaces
    match: Literal["arguments", "name"]
    kind: EditKind
    answer: str
    author: str | None
    messages_key: str
    has_artifact: bool = False

    def result(self, result: Any, runtime: ToolRuntime[Any, Any] | None) -> Any:
        """What the tool answers instead of `result`."""
        if runtime is None or runtime.tool_call_id is None:
            return result  # called by hand
        content, artifact = result if self.has_artifact else (result, None)
        made = self._made(content, artifact, runtime)
        if made is content:
            return result
        return (made, artifact) if self.has_artifact else made

    def _made(self, content: Any, artifact: Any, runtime: ToolRuntime[Any, Any]) -> Any:
        call_id = runtime.tool_call_id or ""
        messages = messages_in(runtime.state, self.messages_key) or []
        before, call = _calls(messages, call_id)
        author = self.author or str(call.get("name", "")) or None
        mark = EditMark(self.kind, author, call_id)
        if isinstance(content, Command):
            return self._marked_command(content, messages, mark)
        if isinstance(content, list) and any(isinstance(item, Command) for item in content):
            return [
                self._marked_command(item, messages, mark) if isinstance(item, Command) else item
                for item in content
            ]
        if isinstance(content, ToolMessage) and content.status == "error":
            return content
        taken: set[str | None] = set()
        for earlier in before:
            how = _how(earlier["name"], runtime) if earlier["name"] != call["name"] else self
            if how is not None:
                with suppress(Exception):  # of a function that fails for its own call as well
                    found = how._targets(messages, earlier, runtime.state, taken)
                    taken.update(message.id for message in found)
        try:
            targets = self._targets(messages, call, runtime.state, taken)
        except Exception as error:  # the tool has run: its result must not be lost
            warn(f"Tool {call.get('name')!r}: replaces= failed ({error!r}); nothing is replaced.")
            return content
        if not targets:
            return content
        if isinstance(content, ToolMessage):
            content, artifact = content.content, content.artifact
        text = _content(content)
        update = [marked(_rewritten(message, text, artifact), mark) for message in targets]
        update.append(
            ToolMessage(
                self.answer,
                tool_call_id=call_id,
                response_metadata={_ANSWERS: [message.id for message in targets]},
            )
        )
        # ToolNode wants the update in the form of its input.
        is_list = isinstance(runtime.state, list)
        return Command(update=update if is_list else {self.messages_key: update})

    def _targets(
        self,
        messages: Sequence[BaseMessage],
        call: Mapping[str, Any],
        state: Any,
        taken: Container[str | None],
    ) -> list[BaseMessage]:
        """The messages that a call's result replaces; those without an id cannot be.

        Args:
            messages: of the state.
            call: of the tool.
            state: of the graph.
            taken: ids of messages that other calls replace.
        """
        free = [message for message in messages if message.id and message.id not in taken]
        if self.replaces == "previous":
            return self._previous(messages, call, free)
        if self.replaces is None:
            return []
        how = self.replaces
        named = how if isinstance(how, str) else how(state, call.get("args", {}))
        names = {named} if isinstance(named, str) else set(named or ())
        return [
            message
            for message in free
            if message.id in names or getattr(message, "tool_call_id", None) in names
        ]

    def _previous(
        self,
        messages: Sequence[BaseMessage],
        call: Mapping[str, Any],
        free: Sequence[BaseMessage],
    ) -> list[BaseMessage]:
        """The last result of the same call that is no error, if there is one."""
        same = {
            each["id"]
            for message in messages
            if isinstance(message, AIMessage)
            for each in message.tool_calls
            if each["name"] == call.get("name")
            and (self.match == "name" or each["args"] == call["args"])
            and each["id"] != call["id"]
        }
        results: list[BaseMessage] = [
            message
            for message in free
            if isinstance(message, ToolMessage)
            and message.tool_call_id in same
            and message.status != "error"
            and _ANSWERS not in message.response_metadata
        ]
        return results[-1:]

    def _marked_command(
        self, command: Command[Any], messages: Sequence[BaseMessage], mark: EditMark
    ) -> Command[Any]:
        """The command with marks on the messages that it replaces."""
        there = {message.id for message in messages if message.id is not None}

        def with_mark(message: Any) -> Any:
            replaces = isinstance(message, BaseMessage) and message.id in there
            is_new = replaces and message.type != "remove" and mark_of(message) is None
            return marked(message, mark) if is_new else message

        update = command.update
        if isinstance(update, Mapping) and isinstance(update.get(self.messages_key), list):
            made = [with_mark(message) for message in update[self.messages_key]]
            return replace(command, update={**update, self.messages_key: made})
        if isinstance(update, list):
            return replace(command, update=[with_mark(message) for message in update])
        return command


def _rewriting(function: Callable[..., Any], how: _Rewriting) -> Callable[..., Any]:
    """The function with its result rewritten, and with a parameter for the runtime."""
    signature = inspect.signature(function)
    has_own = "runtime" in signature.parameters

    def taken(kwargs: dict[str, Any]) -> ToolRuntime[Any, Any] | None:
        found = kwargs.get("runtime") if has_own else kwargs.pop("runtime", None)
        return found if isinstance(found, ToolRuntime) else None

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def arun(*args: Any, **kwargs: Any) -> Any:
            runtime = taken(kwargs)
            return how.result(await function(*args, **kwargs), runtime)

        made: Callable[..., Any] = arun
    else:

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            runtime = taken(kwargs)
            return how.result(function(*args, **kwargs), runtime)

        made = run
    setattr(made, _REWRITING, how)
    if not has_own:
        made.__signature__ = with_keyword(  # type: ignore[attr-defined]
            signature, "runtime", ToolRuntime
        )
        made.__annotations__ = {**function.__annotations__, "runtime": ToolRuntime}
    return made


def _calls(
    messages: Sequence[BaseMessage], call_id: str
) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """The calls before the one of this id in its message, and that call; empty if there is none.

    Of several messages with such a call, the last one is meant.
    """
    for message in reversed(messages):
        calls = getattr(message, "tool_calls", ())
        for index, call in enumerate(calls):
            if call["id"] == call_id:
                return calls[:index], call
    return (), {}


def _how(name: str, runtime: ToolRuntime[Any, Any]) -> _Rewriting | None:
    """How the results of another tool of the node take the place of others, if they do."""
    for tool in runtime.tools or ():
        if isinstance(tool, StructuredTool) and tool.name == name:
            return getattr(tool.func or tool.coroutine, _REWRITING, None)
    return None


def _content(result: Any) -> Any:
    """The content of a message that holds a tool's result: text, or blocks as they are."""
    if isinstance(result, str):
        return result
    if isinstance(result, list) and all(
        isinstance(part, str) or (isinstance(part, dict) and "type" in part) for part in result
    ):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def _rewritten(message: BaseMessage, content: Any, artifact: Any) -> BaseMessage:
    """A copy of the message with another content, under the same ids."""
    changes = {"content": content}
    if isinstance(message, ToolMessage):
        changes |= {"artifact": artifact, "status": "success"}
    return message.model_copy(update=changes)
