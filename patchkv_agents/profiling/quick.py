"""Synthetic pairs from texts shipped with the package, for those who have no data of their own.

Twelve agents read about a town, each other pages in another order and for another question. Of each
there are four edits: `refresh` (a result that was of the wrong page, or had other numbers, is
fetched again), `flip_noted` (a result had other numbers, and a note behind it, the same in both
versions, quotes it from memory with those that are right now), `clear` (earlier results give way to
a placeholder) and `summarize` (some steps give way to the first sentences of what was read). Places
and sizes of the edits differ.
"""

from __future__ import annotations

import re
from typing import Any

from patchkv_agents.context import Conversation, infer_edits, parse_messages, parse_tools
from patchkv_agents.profiling.episode import load_script, write_messages
from patchkv_agents.profiling.pairs import ContextPair, PairSet, pair_set

TASKS = 12
NAME = "quick"
CLEARED = "[Old tool result content cleared]"

_STEPS = (4, 4, 4, 5, 5, 5, 6, 7, 4, 5, 6, 7)  # of each task: some 1,400 to 3,400 tokens
_SHAPES = 8  # places and sizes of edits
_START = 5  # pages by which the reading of one task begins behind that of the one before
_PACES = (7, 5, 11, 13, 17, 19, 1, 23)  # from page to page; coprime to the number of pages
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")


def quick_pairs() -> PairSet:
    """The pairs: four of each of `TASKS` tasks. Always the same."""
    script = load_script()
    made = [pair for task in range(TASKS) for pair in _task(script, task)]
    return pair_set(NAME, made)


def _task(script: dict[str, Any], task: int) -> list[ContextPair]:
    pages = [*script["before"], *script["after"]]
    shape = task % _SHAPES
    # Other steps than those of the tasks before, in an order of its own.
    pace = _PACES[shape]
    order = [pages[(_START * task + pace * step) % len(pages)] for step in range(len(pages))]
    steps = [script["opening_step"], *order[: _STEPS[task]]]
    spare = order[_STEPS[task]]
    # Where the first edit is: early in even tasks, in the middle in odd ones.
    place = (shape + 2) // 4 if task % 2 == 0 else len(steps) // 2
    question = f'What does the guide say under "{steps[place]["result"][0]}"?'
    now = write_messages(script, steps, question)
    cleared = range(place, place + 1 + shape // 2 % 2)
    summarised = range(place, place + 2 + shape // 4)
    outdated = _other_numbers(steps[place]["result"])
    stale = spare["result"] if task % 2 == 0 else outdated
    noted = _noted(steps, place)
    versions = {
        "refresh": (write_messages(script, _with_result(steps, place, stale), question), now),
        "flip_noted": (
            write_messages(script, _with_result(noted, place, outdated), question),
            write_messages(script, noted, question),
        ),
        "clear": (now, _cleared(now, cleared)),
        "summarize": (now, _summarised(now, steps, summarised)),
    }
    tools = parse_tools(script["tools"])
    found = []
    for kind, messages in versions.items():
        old, new = (Conversation(parse_messages(each), tools) for each in messages)
        name = f"{NAME}/{task}"
        found.append(
            ContextPair(f"{name}/{kind}", name, kind, NAME, old, new, infer_edits(old, new))
        )
    return found


def _with_result(
    steps: list[dict[str, Any]], place: int, result: list[str]
) -> list[dict[str, Any]]:
    return [*steps[:place], {**steps[place], "result": result}, *steps[place + 1 :]]


def _noted(steps: list[dict[str, Any]], place: int) -> list[dict[str, Any]]:
    """The steps with a note, half-way behind one of them, that quotes its result from memory."""
    title, *lines = steps[place]["result"]
    quoted = next(s for line in lines for s in _SENTENCE_END.split(line) if re.search(r"\d", s))
    note = f'Note: from memory, under "{title}" it says: {quoted} The page above decides.'
    later = (place + len(steps)) // 2
    step = steps[later]
    return [*steps[:later], {**step, "note": f"{note}\n{step['note']}"}, *steps[later + 1 :]]


def _other_numbers(lines: list[str]) -> list[str]:
    """The same text with other numbers, as before an update."""

    def other(match: re.Match[str]) -> str:
        return "".join(str((int(digit) + 3) % 10) for digit in match[0])

    return [re.sub(r"\d+", other, line) for line in lines]


def _call_index(step: int) -> int:
    """Index of the message with a step's call; its result is the next one."""
    return 2 + 2 * step


def _cleared(messages: list[dict[str, Any]], steps: range) -> list[dict[str, Any]]:
    results = {_call_index(step) + 1 for step in steps}
    return [
        {**message, "content": CLEARED} if index in results else message
        for index, message in enumerate(messages)
    ]


def _summarised(
    messages: list[dict[str, Any]], steps: list[dict[str, Any]], places: range
) -> list[dict[str, Any]]:
    facts = [_SENTENCE_END.split(" ".join(steps[place]["result"][1:]))[0] for place in places]
    summary = "\n".join(["Summary of what was read so far:", *(f"- {fact}" for fact in facts)])
    return [
        *messages[: _call_index(places[0])],
        {"role": "assistant", "content": summary},
        *messages[_call_index(places[-1] + 1) :],
    ]
