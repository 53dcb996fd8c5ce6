"""What the benchmarks share: rounds, documents, provenance."""

from __future__ import annotations

import json
import sys

import pytest

from patchkv_agents import provenance
from patchkv_evals.benchmarks.results import BenchResult, number, spread
from patchkv_evals.benchmarks.timing import Steps, interleaved, timing
from patchkv_evals.provenance import machine


def test_rounds_run_every_side_in_turn_and_the_warm_up_does_not_count():
    calls: list[str] = []

    def side(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = interleaved({"a": lambda: side("a"), "b": lambda: side("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}
    assert timing("x", [3.0, 1.0, 2.0]) == {"x_ms": 2.0, "x_rounds_ms": [3.0, 1.0, 2.0]}


def test_the_time_left_is_the_time_spent_by_the_cost_that_remains(monkeypatch):
    clock = iter([0.0, 10.0, 40.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    told: list[str] = []
    steps = Steps(8, told.append)
    for cost in (1, 3, 4):
        steps.next(f"step of {cost}", cost)
    assert told == [
        "step of 1",
        "step of 3, about 70 s left",
        "step of 4, about 40 s left",
    ]


def test_times_are_printed_with_the_digits_they_have():
    assert spread("x")(timing("x", [1234.4, 1200.0, 1300.0])) == "1,234 [1,200, 1,300]"
    assert spread("x")(timing("x", [1.234])) == "1.23"
    assert number("ratio", ".1%")({"ratio": 0.5}) == "50.0%"
    assert number("ratio", ".1%")({"ratio": None}) == "-"


def test_a_document_says_where_its_figures_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/patchkv", "bench", "plan", "--out", "a b"])
    result = BenchResult("resume", {"rounds": 2}, [{"x": 1}], variant="length")
    file = result.write(tmp_path / "new" / "folder")
    assert file.name == "bench-resume-length.json"
    document = json.loads(file.read_text())
    assert list(document) == [
        "schema", "bench", "command", "created", "config", "versions", "machine", "points",
    ]  # fmt: skip
    assert document["command"] == "patchkv bench plan --out 'a b'"
    assert document["versions"] == provenance.versions()
    assert document["machine"] == machine()
    assert set(document["machine"]) == {"cpu", "threads", "device"}
    assert document["points"] == [{"x": 1}]


@pytest.mark.parametrize("secret", ["secret", "se@cret"])
def test_commands_are_kept_without_passwords(monkeypatch, secret):
    """The last @ of an address ends the password, as URL parsers have it."""
    monkeypatch.setattr(sys, "argv", ["patchkv", "--redis", f"redis://me:{secret}@host:1/0"])
    assert provenance.command_line() == "patchkv --redis redis://...@host:1/0"
