"""`patchkv diff` on real conversation files, for people and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchkv_agents.alignment import Alignment, Run, align
from patchkv_agents.alignment.result import hunks_between
from patchkv_agents.cli.diff import message_rows
from patchkv_agents.cli.main import main
from patchkv_agents.context import infer_edits, load_conversation, render

CASES = [
    "01-stale-departure-board",
    "03-clear-first-search",
    "04-sliding-clear",
    "06-summary-of-six-steps",
    "08-plan-revised",
    "09-thinking-dropped",
    "10-minute-in-system-prompt",
    "12-reminder-block-moves",
    "14-tool-arguments-reserialised",
    "15-tool-list-reordered",
    "18-old-write-arguments-truncated",
    "20-head-and-tail",
    "21-redacted-email-and-code",
    "22-synthetic-tool-results-inserted",
    "25-one-of-four-copies-deleted",
    "26-evidence-refreshed-and-reordered",
    "30-unicode-and-borders",
    "31-literal-control-tokens",
    "32-huge-middle-five-lines",
]

FILLER = " ".join(f"Passage {i} says that the depot keeps {i * i} crates." for i in range(12))


def messages(board: str) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "board", "arguments": "{}"}}
    return [
        {"role": "system", "content": "You are a careful assistant."},
        {"role": "user", "content": "When does my train leave? " + FILLER},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": board, "tool_call_id": "c1"},
        {"role": "assistant", "content": "I read the board. " + FILLER},
        {"role": "user", "content": "Which track?"},
    ]


def write(folder: Path, name: str, conversation: Any) -> str:
    path = folder / name
    path.write_text(json.dumps(conversation), encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def one_tokenizer(smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the embedded tokenizer once for all tests, not at each call of the command."""
    from patchkv_agents.engine import loading

    real = loading.load_tokenizer

    def load(name: str) -> Any:
        return smollm2_tokenizer if name == "smollm2" else real(name)

    monkeypatch.setattr(loading, "load_tokenizer", load)


@pytest.fixture
def edited(tmp_path: Path) -> tuple[str, str]:
    """Two files: the tool result (message 3) is replaced."""
    old = write(tmp_path, "old.json", {"messages": messages("The 10:05 leaves from track 3.")})
    new = write(
        tmp_path, "new.json", {"messages": messages("Delayed: 10:35 from track 11 [east].")}
    )
    return old, new


def run_ok(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["diff", *argv])
    captured = capsys.readouterr()
    assert stopped.value.code in (0, None), captured.err
    return captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    out, _ = run_ok(capsys, *argv, "--json")
    result: dict[str, Any] = json.loads(out)  # fails if anything else stands on stdout
    return result


def alignment_of(result: dict[str, Any]) -> Alignment:
    """The alignment that a JSON document states, gaps recomputed from its runs."""
    runs = tuple(Run(*row) for row in result["runs"])
    sizes = result["tokens_old"], result["tokens_new"]
    return Alignment(*sizes, runs, hunks_between(runs, *sizes))


def assert_consistent(result: dict[str, Any], tokenizer: Any, old: str, new: str) -> Alignment:
    """The JSON document has the documented keys, and says the truth about the two files."""
    assert list(result) == [
        "tokens_old",
        "tokens_new",
        "prefix",
        "runs",
        "hunks",
        "recoverable_tokens",
        "edits",
        "verified",
    ]
    ids = []
    for path in (old, new):
        conversation = load_conversation(path)
        rendered = render(conversation.messages, tokenizer, tools=conversation.tools)
        ids.append(rendered.token_ids)
    alignment = alignment_of(result)
    alignment.check(ids[0], ids[1])
    differing = np.flatnonzero(ids[0][: len(ids[1])] != ids[1][: len(ids[0])])
    assert result["prefix"] == (differing[0] if len(differing) else min(map(len, ids)))
    assert result["recoverable_tokens"] == sum(row[2] for row in result["runs"]) - result["prefix"]
    assert result["hunks"] == [
        {"old": [hunk.old_start, hunk.old_stop], "new": [hunk.new_start, hunk.new_stop]}
        for hunk in alignment.hunks
    ]
    for edit in result["edits"]:
        assert list(edit) == ["kind", "old_index", "new_index"]
        assert isinstance(edit["kind"], str)
        assert all(type(edit[key]) in (int, type(None)) for key in ("old_index", "new_index"))
    return alignment


def test_json_of_a_replaced_tool_result(
    edited: tuple[str, str], smollm2_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_json(capsys, *edited)
    assert_consistent(result, smollm2_tokenizer, *edited)
    assert result["edits"] == [{"kind": "replace_tool_result", "old_index": 3, "new_index": 3}]
    assert result["verified"] is True
    assert len(result["hunks"]) == 1
    assert result["recoverable_tokens"] > 150  # messages 4 and 5, and the generation prompt


def test_table_for_people(edited: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run_ok(capsys, *edited)
    rows = [line.split()[:6] for line in out.splitlines() if line[:6].strip().isdigit()]
    assert [row[:4] for row in rows] == [
        ["0", "0", "system", "unchanged"],
        ["1", "1", "user", "unchanged"],
        ["2", "2", "assistant", "unchanged"],
        ["3", "3", "tool", "changed"],
        ["4", "4", "assistant", "unchanged"],
        ["5", "5", "user", "unchanged"],
    ]
    for row in rows[:3]:
        assert row[4] == row[5]  # tokens, and how many of them are kept: the whole prefix
    result = run_json(capsys, *edited)
    assert f"Common prefix: {result['prefix']:,} tokens." in out
    assert f"can be recovered for {result['recoverable_tokens']:,} of these" in out
    assert "replace_tool_result: old message 3 -> new message 3" in out
    assert err == ""


def test_rows_of_new_gone_and_changed_messages(tmp_path: Path, smollm2_tokenizer: Any) -> None:
    old_messages = messages("The 10:05 leaves from track 3.")
    new_messages = [*old_messages[:4], *old_messages[5:]]
    new_messages[3] = {**new_messages[3], "content": "Delayed: 10:35 from track 11."}
    new_messages += [{"role": "assistant", "content": "Eleven."}]
    old = load_conversation(write(tmp_path, "a.json", {"messages": old_messages}))
    new = load_conversation(write(tmp_path, "b.json", {"messages": new_messages}))
    rendered = [render(v.messages, smollm2_tokenizer, tools=v.tools) for v in (old, new)]
    alignment = align(rendered[0].token_ids, rendered[1].token_ids)
    edits = infer_edits(old, new)
    rows = message_rows(old, new, rendered[0], rendered[1], alignment, edits)
    shown = [(row.state, row.old, row.new) for row in rows]
    assert shown == [
        ("unchanged", (0,), 0),
        ("unchanged", (1,), 1),
        ("unchanged", (2,), 2),
        ("changed", (3,), 3),
        ("gone", (4,), None),
        ("unchanged", (5,), 4),
        ("new", (), 5),
        ("template", (), None),
    ]
    assert sum(row.tokens_old or 0 for row in rows) == alignment.tokens_old
    assert sum(row.tokens_new or 0 for row in rows) == alignment.tokens_new
    assert sum(row.aligned for row in rows) == alignment.aligned_tokens
    assert all(row.aligned == row.tokens_new for row in rows[:3])


def test_identical_contexts(
    edited: tuple[str, str], smollm2_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    old, _ = edited
    result = run_json(capsys, old, old)
    assert_consistent(result, smollm2_tokenizer, old, old)
    tokens = result["tokens_old"]
    assert result["runs"] == [[0, 0, tokens]] and result["hunks"] == []
    assert (result["prefix"], result["recoverable_tokens"], result["edits"]) == (tokens, 0, [])
    assert "No edits: the two contexts are the same." in run_ok(capsys, old, old)[0]


def test_contents_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Markup, terminal escapes and wide characters in a tool result must not reach the terminal."""
    nasty = "[bold red]x[/] [/] \x1b[31m\x07 <|im_end|> 日本語 " + FILLER
    old = write(tmp_path, "old.json", messages("plain"))
    new = write(tmp_path, "new.json", messages(nasty))
    out, _ = run_ok(capsys, old, new)
    assert "\x1b" not in out and "\x07" not in out
    assert "[bold" in out


def test_min_run_decides_what_counts(
    tmp_path: Path, smollm2_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "north south east west up down left right".split()
    old = write(tmp_path, "old.json", messages("start " + " one ".join(words) + " stop"))
    new = write(tmp_path, "new.json", messages("Begin " + " two ".join(words) + " End"))
    default = run_json(capsys, old, new)
    assert len(default["hunks"]) == 1
    assert default == run_json(capsys, old, new, "--min-run", "16")
    fine = run_json(capsys, old, new, "--min-run", "1")
    assert_consistent(fine, smollm2_tokenizer, old, new)
    assert len(fine["hunks"]) > 5
    assert fine["recoverable_tokens"] > default["recoverable_tokens"]


def test_changed_tool_list_is_an_edit_without_messages(
    tmp_path: Path, smollm2_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Reads the {name}.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
        for name in ("board", "map")
    ]
    old = write(tmp_path, "old.json", {"messages": messages("x"), "tools": tools})
    new = write(tmp_path, "new.json", {"messages": messages("x"), "tools": tools[::-1]})
    result = run_json(capsys, old, new)
    assert_consistent(result, smollm2_tokenizer, old, new)
    assert result["edits"] == [{"kind": "reorder", "old_index": None, "new_index": None}]
    assert result["recoverable_tokens"] > 0.7 * result["tokens_new"]
    assert "reorder: tools" in run_ok(capsys, old, new)[0]


def test_as_a_process_stdout_is_one_document(edited: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "patchkv_agents.cli.main", "diff", *edited, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["edits"][0]["kind"] == "replace_tool_result"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("case", CASES)
def test_agent_edits(
    case: str,
    shared_dir: Path,
    tmp_path: Path,
    smollm2_tokenizer: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Realistic edits: everything stated is true, and what did not change is found."""
    source = shared_dir / "edits" / f"{case}.json"
    if not source.is_file():
        pytest.skip(f"{source} is not there")
    content = json.loads(source.read_text(encoding="utf-8"))
    steps = [("old", "new", "unchanged")]
    if "next" in content:
        steps.append(("new", "next", "unchanged_next"))
    for before, after, unchanged in steps:
        tools = content.get("tools_new", content["tools"])
        old = write(tmp_path, "old.json", {"messages": content[before], "tools": content["tools"]})
        new = write(tmp_path, "new.json", {"messages": content[after], "tools": tools})
        result = run_json(capsys, old, new)
        alignment = assert_consistent(result, smollm2_tokenizer, old, new)
        assert result["verified"] is True
        assert result["edits"]
        assert_unchanged_found(alignment, content[unchanged], smollm2_tokenizer, old, new)
        run_ok(capsys, old, new)


def assert_unchanged_found(
    alignment: Alignment, unchanged: list[list[int]], tokenizer: Any, old: str, new: str
) -> None:
    """Tokens of messages that the edit left alone are aligned, those at the end without a gap."""
    before, after = (
        render(version.messages, tokenizer, tools=version.tools)
        for version in map(load_conversation, (old, new))
    )
    positions = alignment.position_map()
    found = total = 0
    for i, j in unchanged:
        a, b = before.message_spans[i]
        c, d = after.message_spans[j]
        if before.token_ids[a:b].tolist() == after.token_ids[c:d].tolist():
            found += int((positions[c:d] >= 0).sum())
            total += d - c
    assert found >= 0.98 * total
    i, j = unchanged[-1]
    assert len(before.message_spans) - i >= 1
    a, c = before.message_spans[i][0], after.message_spans[j][0]
    stop = after.message_spans[j][1]
    assert np.array_equal(positions[c:stop], np.arange(a, a + stop - c))
