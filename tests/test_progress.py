"""Progress of long work on standard error, where that is no terminal."""

from __future__ import annotations

from patchkv_agents.progress import Progress, show_progress


def test_each_step_is_a_line_with_its_place_and_the_time_left(capsys) -> None:
    with show_progress("loading a model") as report:
        report(Progress("reading [red]pairs[/red]"))
        for done in range(4):
            report(Progress(f"pair {done}", done, 4))
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == ""
    assert lines[:4] == [
        "loading a model", "reading [red]pairs[/red]", "0 of 4: pair 0", "1 of 4: pair 1"
    ]  # fmt: skip
    # From the second step that is done there is a pace: the steps took milliseconds.
    assert lines[4:] == ["2 of 4: pair 2, about 1 s left", "3 of 4: pair 3, about 1 s left"]
