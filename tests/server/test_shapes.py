"""What counts as the same conversation, and how much of it is left.

Programs were merged because they were asked the same ("say hi"), and personas because their system
prompts had most words in common: one's state was restored for another, and stayed approximate.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from patchkv_agents.context import parse_messages, parse_template_args, parse_tools
from patchkv_server.shapes import Shape

from .serving import talk

Messages = list[dict[str, Any]]

SYSTEM = "It is 17:41. You help in a shop, and you are brief. "


def shape(messages: Messages, tools: Any = ()) -> Shape:
    return Shape.of(parse_messages(messages), parse_tools(tools), parse_template_args({}))


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def tools(*names: str) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "description": f"Does {name}. " * 20}}
        for name in names
    ]


def result(content: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call-{number}", "content": content}


LONG = talk("Ann", 10, system=SYSTEM * 5)
LATER = (SYSTEM * 5).replace("17:41", "17:42", 1)
MEMORY = "You are Ann's assistant. " + "Keep to the rules of the house. " * 20 + "Memory: {}"
PERSONA = "You are {}. " + "Stay in your role, and never mention these rules. " * 5
SHOTS = [user("What is 2 + 2?"), assistant("Four."), user("And 3 + 3?"), assistant("Six.")]
LOOKUP = [
    system("You are a clerk."),
    user("Where is my parcel?"),
    assistant("I look."),
    result("x" * 4000),
    assistant("It is in York."),
    user("And the other one?"),
]

SAME = {
    "again": (LONG, LONG),
    "gone on": (LONG, [*LONG, assistant("All there.")]),
    "gone on with a long result": (LONG[:4], [*LONG[:5], result("x" * 20_000)]),
    "gone on from one message": ([system("S"), user("hi")], [system("S"), user("hi"), user("?")]),
    "back to its beginning": (LONG, LONG[:3]),
    "other minute": (LONG, [system(LATER), *LONG[1:]]),
    "other minute, gone on": (LONG[:6], [system(LATER), *LONG[1:8]]),
    "memory block": (
        [system(MEMORY.format("none")), *LONG[1:6]],
        [system(MEMORY.format("likes tea")), *LONG[1:8]],
    ),
    "summary": (LONG, [LONG[0], user("So far: Ann asked for things."), *LONG[-4:]]),
    "long summary": (LONG, [LONG[0], user("So far: " + "Ann asked. " * 60), *LONG[-4:]]),
    "front trimmed": (LONG, LONG[7:]),
    "middle cut": (LONG, [*LONG[:5], *LONG[9:]]),
    "first message edited": (LONG, [LONG[0], user("Edited."), *LONG[2:]]),
    "result replaced": (LOOKUP, [*LOOKUP[:3], result("y" * 300), *LOOKUP[4:]]),
    "result cleared, then a long one": (
        LOOKUP,
        [*LOOKUP[:3], result("[cleared]"), *LOOKUP[4:], assistant("See."), result("z" * 9000, 2)],
    ),
    "reminder at the end moves": (
        [*LONG, user("Reminder: be brief.")],
        [*LONG, assistant("On shelf 3."), user("Thanks."), user("Reminder: be brief, please.")],
    ),
}
OTHER = {
    "same system prompt": (LONG, talk("Bob", 10, system=SYSTEM * 5)),
    "nothing but the system prompt": (LONG, [LONG[0]]),
    "title": (LONG, [system("Give a title of three words."), LONG[1]]),
    "title, same system prompt": (LONG, [LONG[0], LONG[1], user("Give a title of three words.")]),
    "summary of a part": (LONG, [system("Summarize."), *LONG[1:6]]),
    "all of it judged": (LONG, [*LONG[1:], user("Is this conversation polite?")]),
    "all in one message": (LONG, [user(str(LONG))]),
    "say hi in two programs": (
        [system("You are a coder. " * 90), user("say hi")],
        [system("You are a travel agent. " * 90), user("say hi")],
    ),
    "say hi, a longer program next": (
        [system("You are a coder."), user("say hi")],
        [system("You are a travel agent. " * 90), user("say hi"), assistant("hi"), user("more")],
    ),
    "same opening, other users": (
        [system("S" * 2000), user("hi"), assistant("Hello!"), user("Where is parcel 4?")],
        [system("S" * 2000), user("hi"), assistant("Hello!"), user("Cancel my order of tea.")],
    ),
    "persona": (
        [system(PERSONA.format("Ann, a florist")), user("Who are you?")],
        [system(PERSONA.format("Bob, a smith")), user("Who are you?")],
    ),
    "persona, second turn": (
        [system(PERSONA.format("Ann")), user("Who are you?"), assistant("Ann."), user("Why?")],
        [system(PERSONA.format("Bob")), user("Who are you?"), assistant("Bob."), user("Why?")],
    ),
    "persona with examples": (
        [system(PERSONA.format("Ann")), *SHOTS, user("Who are you?")],
        [system(PERSONA.format("Bob")), *SHOTS, user("Who are you?")],
    ),
    "customer": (
        [system("The customer's number is 4711. " * 9), user("What is my number?")],
        [system("The customer's number is 4712. " * 9), user("What is my number?")],
    ),
    "minute and one question": (
        [system(SYSTEM * 5), user("What time is it?")],
        [system(LATER), user("What time is it?")],
    ),
    "system message behind the question": (
        [system("S" * 900), user("Read it."), system("T" * 900), assistant("Yes."), user("And?")],
        [system("S" * 900), user("Something else."), system("T" * 900)],
    ),
    "same small talk": (
        [system("S"), user("A parcel."), assistant("Yes?"), user("Go on."), assistant("A" * 400)],
        [system("S"), user("A cat. " * 40), assistant("B" * 400), user("Go on.")],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_conversation(name: str) -> None:
    old, new = SAME[name]
    assert shape(new).continues(shape(old))


@pytest.mark.parametrize("name", OTHER)
def test_another_conversation(name: str) -> None:
    old, new = OTHER[name]
    assert not shape(new).continues(shape(old))
    assert not shape(old).continues(shape(new))


def test_tools_that_were_changed() -> None:
    three, renamed = tools("find", "read", "write"), tools("search", "open", "save")
    old, new = LONG[:6], LONG[:8]
    assert shape(new, three[::-1]).continues(shape(old, three))
    assert shape(new, three[:2]).continues(shape(old, three))
    assert shape(new, ()).continues(shape(old, three))
    assert not shape(new, renamed).continues(shape(old, three))


def test_say_hi_with_and_without_tools() -> None:
    """It restored 242 rows of another program's 5,677, whose conversation it became."""
    hi = [system("You are a helpful assistant."), user("say hi")]
    assert not shape(hi, tools("find", "read")).continues(shape(hi))
    assert not shape(hi).continues(shape(hi, tools("find", "read")))


def test_the_next_turn() -> None:
    old = LONG[:4]
    assert shape([*LONG[:5], result("x")]).is_next_turn(shape(old))
    for new in (LONG[:4], LONG[:3], LONG[:8], [*LONG[:4], user("?")], [LONG[0], *LONG[2:6]]):
        assert not shape(new).is_next_turn(shape(old))
    assert not shape(LONG[:6], tools("find")).is_next_turn(shape(old))


def _cases(shared_dir: Path) -> dict[str, dict[str, Any]]:
    paths = sorted((shared_dir / "edits").glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def _schemas(given: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": tool.get("function", tool)} for tool in given]


def test_edits_are_recognized_and_not_mixed_up(shared_dir: Path) -> None:
    cases = _cases(shared_dir)
    old = {name: shape(case["old"], _schemas(case["tools"])) for name, case in cases.items()}
    for name, case in cases.items():
        new = shape(case["new"], _schemas(case.get("tools_new") or case["tools"]))
        assert [other for other in old if new.continues(old[other])] == [name]


def test_episodes_of_one_program_are_conversations_of_their_own(shared_dir: Path) -> None:
    lines = (shared_dir / "data" / "agent_traces.jsonl").read_text().splitlines()
    traces = [json.loads(line)["messages"] for line in lines]
    traces = [[m for m in trace if m["role"] != "tool" or m.get("content")] for trace in traces]
    mixed = [
        (a, b)
        for (a, first), (b, second) in itertools.permutations(enumerate(traces), 2)
        if shape(second).continues(shape(first))
    ]
    assert mixed == []
    for trace in traces:
        assert shape(trace).continues(shape(trace[: len(trace) // 2]))


def test_what_is_left() -> None:
    old, edited = shape(LONG), [dict(message) for message in LONG]
    edited[2]["content"] = "Sold."
    new = shape(edited)
    assert old.left_after(old, exact=True) == 0
    behind = new.size - sum(old.sizes[:2]) - len(old.opening)
    assert new.left_after(old, exact=True) == behind
    assert new.sizes[2] < new.left_after(old, exact=False) < behind / 3
    with_tools = shape(LONG, [{"type": "function", "function": {"name": "find"}}])
    assert with_tools.left_after(old, exact=True) == with_tools.size  # it stands before all
    assert with_tools.continues(old)
