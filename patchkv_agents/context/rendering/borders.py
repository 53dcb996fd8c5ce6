"""Cuts a rendered context into messages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from patchkv_agents.context.rendering.encoding import Control
from patchkv_agents.context.rendering.marks import Piece


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendered text and what is known of it.

    Attributes:
        text: the text.
        controls: the template's control tokens in it, in order.
        opener: the control token with which a turn begins, e.g. `<|im_start|>`; None if unknown.
        prompt_start: first character of the generation prompt; the text's length without one.
    """

    text: str
    controls: Sequence[Control]
    opener: str | None
    prompt_start: int


def message_ranges(layout: Layout, pieces: Sequence[Piece], count: int) -> list[tuple[int, int]]:
    """First character and end of each of `count` messages; ranges do not overlap.

    A message reaches from the start of its turn to the start of the next one; what the template
    writes before the first turn, tools between two turns, and the generation prompt belong to none.
    A message which the template does not show gets an empty range. Ranges ascend, unless the
    template itself shows the messages in another order.
    """
    runs = _runs(pieces)
    tools = [piece.start for piece in pieces if piece.message < 0]
    starts, stops = [], []
    previous = 0
    for run in runs:
        start = _border(layout, previous, run.start)
        starts.append(start)
        stops.append(_before_tools(layout, previous, start, tools))
        previous = run.stop
    stops = [*stops[1:], max(previous, layout.prompt_start)]
    shown = {run.message: (starts[n], stops[n]) for n, run in enumerate(runs)}
    ranges = []
    place = starts[0] if starts else layout.prompt_start
    for message in range(count):
        ranges.append(shown.get(message, (place, place)))
        place = ranges[-1][1]
    return ranges


def opening_token(prompt: str, controls: Sequence[str]) -> str | None:
    """The control token at the start of a generation prompt; `controls` has longer ones first."""
    start = prompt.lstrip()
    return next((control for control in controls if start.startswith(control.strip())), None)


def _runs(pieces: Sequence[Piece]) -> list[Piece]:
    """The stretch of text of each message, in the order of the text.

    Where a template shows a message in several places, the longest stretch counts.
    """
    runs: list[Piece] = []
    for piece in pieces:
        if piece.message < 0:
            continue
        if runs and runs[-1].message == piece.message:
            runs[-1] = Piece(piece.message, "", runs[-1].start, max(runs[-1].stop, piece.stop))
        else:
            runs.append(piece)
    longest: dict[int, Piece] = {}
    for run in runs:
        best = longest.get(run.message)
        if best is None or run.stop - run.start > best.stop - best.start:
            longest[run.message] = run
    return sorted(longest.values(), key=lambda run: run.start)


def _before_tools(layout: Layout, previous: int, border: int, tools: Sequence[int]) -> int:
    """Where a message ends: at the next one's border, or before tools that stand between the two.

    Mistral's templates show the tools before the last question.
    """
    index = bisect_left(tools, previous)
    if index == len(tools) or tools[index] >= border:
        return border
    if not any(previous <= a and b <= tools[index] for a, b, _ in layout.controls):
        return border  # the tools are in the message's own turn
    return _border(layout, previous, tools[index])


def _border(layout: Layout, start: int, stop: int) -> int:
    """Where, in the template's text between two pieces of content, the second message begins."""
    first, last = (bisect_left(layout.controls, (end,)) for end in (start, stop))
    controls = [c for c in layout.controls[first:last] if c[1] <= stop]
    opener = layout.opener
    turns = [c for c in controls if layout.text[c[0] : c[1]].strip() == opener]
    if turns:
        return turns[-1][0]
    if len(controls) >= 2:  # the end of one message and the beginning of the next
        return controls[-1][0]
    if controls:  # a beginning (GLM-4's <|user|>), or an end (Mistral's [/INST])
        return controls[0][0] if opener or start == 0 else controls[0][1]
    # Plain text such as "\nUser: ": the line that leads to the content.
    gap = layout.text[start:stop]
    lines = gap.rstrip("\n").rpartition("\n")
    return stop - len(gap) + len(lines[0]) + len(lines[1]) if lines[2].strip() else stop
