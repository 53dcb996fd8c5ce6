"""The demo's conversation: an agent reads about a town, and one page it read turns out to be stale.

The text lies in `data/episode.json`. The edited page sits about one fifth into the context, and
nothing after it names the fact that changed: a note that repeated it would leave the old answer
standing in a full prefill too. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from patchkv_agents.errors import InputError

DEFAULT_TOKENS = 4096
EDIT_POSITION = 0.2
"""Where the edited result is wanted, as a share of the whole context."""

_CLOSE_ENOUGH = 0.99
"""Stop fitting at this share of the wanted length; 0.97 is what callers may rely on."""
_FITTING_ROUNDS = 6

CountTokens = Callable[[list[dict[str, Any]], list[dict[str, Any]]], int]
"""Renders messages and tool schemas through a model's chat template and counts the tokens."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One conversation before and after its edit, in OpenAI form.

    `old` and `new` differ only in the content of message `edited_index`, a tool result. The last
    message asks `question`; the answer is `answer_old` in `old` and `answer_new` in `new`.
    """

    old: list[dict[str, Any]]
    new: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    edited_index: int
    answer_old: str
    answer_new: str
    question: str


def build_episode(tokens: int, count_tokens: CountTokens) -> Episode:
    """Build the episode at a rendered length of at most `tokens`, the generation prompt included.

    Whole passages are added before and after the edited result. From about 3,000 tokens on, the
    longer of the two versions comes within 3 % of `tokens`, and the edit starts at 0.17 to 0.23 of
    it. A shorter episode is coarser, with the edit further back. The same arguments always give
    the same episode.

    Args:
        tokens: wanted length of the rendered context; `DEFAULT_TOKENS` suits a demo.
        count_tokens: renders messages and tools and counts the tokens; called at most ten times.

    Raises:
        InputError: the text cannot be made that short, or does not suffice.
    """
    script = load_script()
    nothing = _Choice((), ())
    everything = _Choice(
        tuple(range(len(script["before"]))),
        tuple(range(len(script["after"]))),
    )
    shell = _assemble(script, nothing)
    old_size = count_tokens(shell.old, shell.tools)
    new_size = count_tokens(shell.new, shell.tools)
    # One message differs, so the version that is longer here is so at any length.
    longer, smallest = ("old", old_size) if old_size >= new_size else ("new", new_size)

    def measure(chosen: _Choice) -> int:
        episode = _assemble(script, chosen)
        return count_tokens(episode.old if longer == "old" else episode.new, episode.tools)

    if tokens < smallest:
        raise InputError(
            f"the demo's episode cannot be shorter than {smallest} tokens with this model: "
            f"ask for --tokens {smallest} or more"
        )
    largest = measure(everything)
    if tokens > largest:
        raise InputError(
            f"the demo's episode has text for at most {largest} tokens with this model: "
            f"ask for --tokens {largest} or fewer, or pass your own --old and --new"
        )
    if tokens == largest:
        return _assemble(script, everything)
    head = count_tokens(shell.old[: shell.edited_index], shell.tools)
    chosen = _fit(script, tokens, smallest, largest, head=head, measure=measure)
    return _assemble(script, chosen)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Indices of the optional passages, ascending, before and after the edited result."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def _fit(
    script: dict[str, Any],
    tokens: int,
    smallest: int,
    largest: int,
    *,
    head: int,
    measure: Callable[[_Choice], int],
) -> _Choice:
    """Choose passages for at most `tokens`, of which one fifth before the edit.

    Args:
        script: the data file.
        tokens: wanted length.
        smallest: length without optional passages.
        largest: length with all of them.
        head: length of what is before the edit in the smallest episode.
        measure: the true length of a choice.
    """
    # Passages are weighed by their characters: each costs about the same tokens a character.
    lengths = [[_characters(step) for step in script[side]] for side in ("before", "after")]
    rate = (largest - smallest) / sum(map(sum, lengths))
    before, after = ([round(length * rate) for length in side] for side in lengths)

    best, best_size, wanted = _Choice((), ()), smallest, tokens
    for _ in range(_FITTING_ROUNDS):
        in_front = round(EDIT_POSITION * wanted) - head
        chosen = _choose(before, after, max(wanted - smallest, 0), in_front)
        size = measure(chosen)
        if best_size < size <= tokens:
            best, best_size = chosen, size
        if _CLOSE_ENOUGH * tokens <= size <= tokens:
            break
        # The weights are estimates: aim lower or higher by what this try was off.
        wanted -= size - tokens if size > tokens else -(tokens - size) // 2
    return best


def _choose(before: Sequence[int], after: Sequence[int], room: int, in_front: int) -> _Choice:
    """Fill `room` tokens from below, and among good fillings put `in_front` before the edit.

    Args:
        before: cost of each passage that may stand before the edit, in tokens.
        after: the same, after the edit.
        room: tokens to fill.
        in_front: how many of them are wanted before the edit.
    """
    before_sums, after_sums = _subset_sums(before, room), _subset_sums(after, room)
    totals = sorted(after_sums)

    def behind(total_before: int) -> int:
        return totals[bisect_right(totals, room - total_before) - 1]

    def badness(total_before: int) -> tuple[int, int]:
        unfilled = room - total_before - behind(total_before)
        return max(unfilled - room // 100, 0), abs(total_before - in_front)

    chosen = min(before_sums, key=badness)
    return _Choice(before_sums[chosen], after_sums[behind(chosen)])


def _subset_sums(costs: Sequence[int], limit: int) -> dict[int, tuple[int, ...]]:
    """All sums of at most `limit`, each with the ascending indices of costs that make it.

    Where several choices give the same sum, the one with the earlier items is kept.
    """
    sums: dict[int, tuple[int, ...]] = {0: ()}
    for index, cost in enumerate(costs):
        for total, chosen in list(sums.items()):
            if total + cost <= limit:
                sums.setdefault(total + cost, (*chosen, index))
    return sums


def load_script() -> dict[str, Any]:
    """Read the data file."""
    data = files("patchkv_agents.profiling") / "data" / "episode.json"
    script: dict[str, Any] = json.loads(data.read_text(encoding="utf-8"))
    return script


def _characters(step: dict[str, Any]) -> int:
    """Length of the text that a step adds to the rendered context."""
    call = step["tool"] + json.dumps(step["arguments"])
    return sum(map(len, (step["intent"], call, *step["result"], step["note"])))


def _assemble(script: dict[str, Any], chosen: _Choice) -> Episode:
    """Write the chosen steps out as messages, in the order of the data file."""
    edited = script["edited"]
    question = script["question"]
    steps = [script["opening_step"]]
    steps += [script["before"][index] for index in chosen.before]
    place = len(steps)
    steps += [edited]
    steps += [script["after"][index] for index in chosen.after]

    def version(which: str) -> list[dict[str, Any]]:
        shown = [*steps[:place], {**edited, **edited[which]}, *steps[place + 1 :]]
        return write_messages(script, shown, question)

    return Episode(
        old=version("old"),
        new=version("new"),
        tools=script["tools"],
        # System and user message, two messages a step, and the call of the edited step.
        edited_index=2 + 2 * place + 1,
        answer_old=edited["old"]["answer"],
        answer_new=edited["new"]["answer"],
        question=question,
    )


def write_messages(
    script: dict[str, Any], steps: Sequence[dict[str, Any]], question: str
) -> list[dict[str, Any]]:
    """A conversation in OpenAI form: two messages open it, each step has two, and two close it.

    Args:
        script: the data file.
        steps: what the agent did: `intent`, `tool`, `arguments`, `result` (lines) and `note` each.
        question: what the user asks, at the beginning and at the end.
    """
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": script["system"]},
        {"role": "user", "content": script["opening"].format(question=question)},
    ]
    thought = "\n".join(script["plan"])
    for number, step in enumerate(steps, start=1):
        call_id = f"call_{number:02d}"
        function = {"name": step["tool"], "arguments": dict(step["arguments"])}
        call = {"id": call_id, "type": "function", "function": function}
        messages += [
            {
                "role": "assistant",
                "content": f"{thought}\n{step['intent']}",
                "tool_calls": [call],
            },
            {
                "role": "tool",
                "tool_call_id": call_id,
                "name": step["tool"],
                "content": "\n".join(step["result"]),
            },
        ]
        thought = step["note"]
    return [
        *messages,
        {"role": "assistant", "content": f"{thought}\n{script['wrapup']}"},
        {"role": "user", "content": script["closing"].format(question=question)},
    ]
