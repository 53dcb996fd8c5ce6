"""An agent's work as a script of steps, and the conversation that it makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from patchkv_agents.context import Conversation, FrozenJson, Message, ToolCall

SEARCH = "search"
SYSTEM = (
    "You are a research assistant. You answer a question by searching an encyclopedia: plan, "
    "search, keep short notes, then answer. Rely on the search results, not on memory."
)
CLEARED = "[Result cleared to save space. Search again if it is needed.]"

_TOOLS = (
    FrozenJson.of(
        {
            "type": "function",
            "function": {
                "name": SEARCH,
                "description": "Search the encyclopedia. Returns one passage or several.",
                "parameters": {
                    "type": "object",
                    "properties": {"query": {"type": "string"}},
                    "required": ["query"],
                },
            },
        },
        "tools",
    ),
)


@dataclass(frozen=True, slots=True)
class Step:
    """A search: what the assistant says, the query, and the result.

    Attributes:
        key: names the step in all versions of an episode, and its call.
        thought: a note on the step before, and what comes next.
        query: of the search.
        result: what the tool returned.
        plan: stands before the thought, in the step that has the plan.
    """

    key: int
    thought: str
    query: str
    result: str
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """Stands for several steps; takes one message."""

    keys: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """An answer of the assistant's between two steps, and what the user says to it."""

    answer: str
    reply: str


Item = Step | Summary | Exchange


@dataclass(frozen=True, slots=True)
class Script:
    """One version of an episode."""

    question: str
    items: tuple[Item, ...]
    closing: str

    def step(self, key: int) -> Step:
        """The step of that key, which must not have been summarised."""
        return next(item for item in self.items if isinstance(item, Step) and item.key == key)

    def with_step(self, step: Step) -> Script:
        """The script with another step under the same key."""
        items = tuple(
            step if isinstance(item, Step) and item.key == step.key else item for item in self.items
        )
        return replace(self, items=items)

    def with_item(self, item: Item, key: int | None) -> Script:
        """The script with an item in front of a step, or behind the last one if None."""
        keys = [other.key if isinstance(other, Step) else None for other in self.items]
        place = len(keys) if key is None else keys.index(key)
        return replace(self, items=(*self.items[:place], item, *self.items[place:]))

    def with_note(self, key: int | None, note: str) -> Script:
        """The script with a note in front of a step's thought, or of the last words if None."""
        if key is None:
            return replace(self, closing=f"{note}\n{self.closing}")
        step = self.step(key)
        return self.with_step(replace(step, thought=f"{note}\n{step.thought}"))

    def with_summary(self, summary: Summary) -> Script:
        """The script with a summary in place of the steps it names, which are neighbours."""
        items: list[Item] = []
        for item in self.items:
            if not (isinstance(item, Step) and item.key in summary.keys):
                items.append(item)
            elif item.key == summary.keys[0]:
                items.append(summary)
        return replace(self, items=tuple(items))

    def messages_of(self, keys: Iterable[int]) -> tuple[int, ...]:
        """Indices of the messages of some steps: of a step its call and its result."""
        wanted = set(keys)
        found: list[int] = []
        index = 2  # behind system and opening
        for item in self.items:
            own = {item.key} if isinstance(item, Step) else set[int]()
            if isinstance(item, Summary):
                own = set(item.keys)
            length = 1 if isinstance(item, Summary) else 2
            if own & wanted:
                found += range(index, index + length)
            index += length
        return tuple(found)

    def conversation(self) -> Conversation:
        """The messages; the last one asks the question."""
        opening = (
            f"I need an answer to this question: {self.question}\n"
            "Look up what it takes, and tell me when you are ready."
        )
        final = (
            "Answer the question from the search results above, with the answer alone, in as few "
            f"words as you can.\nQuestion: {self.question}"
        )
        messages = [Message("system", SYSTEM), Message("user", opening)]
        for item in self.items:
            if isinstance(item, Summary):
                messages.append(Message("user", item.text))
                continue
            if isinstance(item, Exchange):
                messages += [Message("assistant", item.answer), Message("user", item.reply)]
                continue
            call_id = f"call_{item.key:02d}"
            content = f"{item.plan}\n{item.thought}" if item.plan else item.thought
            call = ToolCall.of(SEARCH, {"query": item.query}, id=call_id)
            messages += [
                Message("assistant", content, tool_calls=(call,)),
                Message("tool", item.result, name=SEARCH, tool_call_id=call_id),
            ]
        messages += [Message("assistant", self.closing), Message("user", final)]
        return Conversation(tuple(messages), _TOOLS)
