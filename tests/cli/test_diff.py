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
from patchkv_agents.cli.diff_view import message_rows
from patchkv_agents.cli.main import main
from patchkv_agents.context import load_conversation, render
from patchkv_agents.context.changes.matching import match_messages

from ..alignment.reference import assert_holds

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
    from patchkv_agents.backends.transformers import loading

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
    runs, moves = (tuple(Run(*row) for row in result[key]) for key in ("runs", "moves"))
    sizes = result["tokens_old"], result["tokens_new"]
    return Alignment(*sizes, runs, hunks_between(runs, *sizes), moves)


def assert_consistent(result: dict[str, Any], tokenizer: Any, old: str, new: str) -> Alignment:
    """The JSON document has the documented keys, and says the truth about the two files."""
    assert list(result) == [
        "tokens_old",
        "tokens_new",
        "prefix",
        "runs",
        "moves",
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
    assert_holds(alignment, ids[0], ids[1], min_run=1)
    differing = np.flatnonzero(ids[0][: len(ids[1])] != ids[1][: len(ids[0])])
    assert result["prefix"] == (differing[0] if len(differing) else min(map(len, ids)))
    assert result["recoverable_tokens"] == sum(row[2] for row in result["runs"]) - result["prefix"]
    assert result["hunks"] == [
        {"old": [hunk.old_start, hunk.old_stop], "new": [hunk.new_start, hunk.new_stop]}
        for hunk in alignment.hunks
    ]
    for edit in result["edits"]:
        assert list(edit) == ["kind", "old_index", "new_index", "declared", "partial"]
        assert isinstance(edit["kind"], str)
        assert edit["declared"] is False and isinstance(edit["partial"], bool)
        assert all(type(edit[key]) in (int, type(None)) for key in ("old_index", "new_index"))
    return alignment


def test_json_of_a_replaced_tool_result(
    edited: tuple[str, str], smollm2_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_json(capsys, *edited)
    assert_consistent(result, smollm2_tokenizer, *edited)
    assert result["edits"] == [
        {
            "kind": "replace_tool_result",
            "old_index": 3,
            "new_index": 3,
            "declared": False,
            "partial": False,
        }
    ]
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
    matching = match_messages(old.messages, new.messages)
    rows = message_rows(old.messages, new.messages, rendered[0], rendered[1], alignment, matching)
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
    assert sum(row.kept for row in rows) == alignment.aligned_tokens
    assert sum(row.moved for row in rows) == alignment.moved_tokens == 0
    assert all(row.kept == row.tokens_new for row in rows[:3])


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
    nasty = "[bold red]x[/] [/] :smile: \x1b[31m\x07 \u202e <|im_end|> 日本語 " + FILLER
    old = write(tmp_path, "old.json", messages("plain"))
    new = write(tmp_path, "new.json", messages(nasty))
    out, _ = run_ok(capsys, old, new)
    assert not {"\x1b", "\x07", "\u202e"} & set(out)
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
    edit = {"kind": "reorder", "old_index": None, "new_index": None}
    assert result["edits"] == [{**edit, "declared": False, "partial": False}]
    assert result["recoverable_tokens"] > 0.7 * result["tokens_new"]
    assert "reorder: tools" in run_ok(capsys, old, new)[0]


def test_as_a_process_stdout_is_one_document(edited: tuple[str, str]) -> None:
    """And torch, which takes seconds to load, is not needed for it."""
    code = (
        "import sys\n"
        "from patchkv_agents.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    print('torch' in sys.modules, file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, "diff", *edited, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["edits"][0]["kind"] == "replace_tool_result"
    assert done.stderr == "False\n"


def test_moved_text_is_shown_as_moved(
    tmp_path: Path, smollm2_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block that leaves one message and ends another one, and a whole message that moves."""
    note = "\n\nRules: " + " ".join(f"rule {i} forbids crate {7 * i}," for i in range(12))
    before = messages("The 10:05 leaves from track 3.")
    after = [*messages("The 10:05 leaves from track 3."), {"role": "assistant", "content": "3."}]
    before[1]["content"] += note
    after.append({"role": "user", "content": "Thanks." + note})
    old, new = write(tmp_path, "old.json", before), write(tmp_path, "new.json", after)
    result = run_json(capsys, old, new)
    alignment = assert_consistent(result, smollm2_tokenizer, old, new)
    assert alignment.moved_tokens > 60
    assert {"kind": "move", "old_index": 1, "new_index": 7, "declared": False, "partial": True} in (
        result["edits"]
    )
    out, _ = run_ok(capsys, old, new)
    assert (
        f"{alignment.moves[0].length} tokens of these stood elsewhere: message 1 -> message 7"
        in out
    )
    row = next(line.split() for line in out.splitlines() if line.split()[:2] == ["7", "user"])
    assert row[2] == "new" and row[5] == str(alignment.moved_tokens)

    before = messages("The 10:05 leaves from track 3.")
    order = [0, 4, 1, 2, 3, 5]
    old = write(tmp_path, "old.json", before)
    new = write(tmp_path, "new.json", [before[i] for i in order])
    result = run_json(capsys, old, new)
    assert [edit["kind"] for edit in result["edits"]] == ["move"]
    assert " moved " in run_ok(capsys, old, new)[0]


def test_narrow_terminals_get_lines(
    edited: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out, _ = run_ok(capsys, *edited)
    assert "3 > 3 tool changed: " in out
    assert "4 > 4 assistant unchanged: " in out


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_follow_the_environment(
    no_color: bool,
    edited: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    out, _ = run_ok(capsys, *edited)
    assert ("\x1b[33m" in out) is not no_color  # yellow, for the changed message


def test_messages_that_the_template_refuses_are_named_by_their_file(
    tmp_path: Path,
    smollm2_tokenizer: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error told of an image in message 1, and not in which of the two files."""
    image = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    old = write(tmp_path, "old.json", messages("x"))
    new = write(tmp_path, "new.json", [{"role": "user", "content": image}])
    for pair in ((old, new), (new, old)):
        with pytest.raises(SystemExit) as stopped:
            main(["diff", *pair])
        captured = capsys.readouterr()
        assert stopped.value.code == 2 and captured.out == ""
        assert captured.err.startswith(f"patchkv: {new}: ") and captured.err.count("\n") == 1


def test_hosted_model_counts_are_marked_as_estimates(
    edited: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a vocabulary the counts are no one's tokens, and everything says so."""
    monkeypatch.setattr("tiktoken.get_encoding", no_network)
    result = run_json(capsys, *edited, "--model", "gpt-4o")
    assert result["estimate"] is True and result["verified"] is False
    assert "o200k_base cannot be loaded (ConnectionError" in result["counting"]
    assert result["edits"][0]["kind"] == "replace_tool_result"
    assert result["recoverable_tokens"] > 100
    alignment = alignment_of(result)
    assert len(alignment.hunks) == 1
    out, err = run_ok(capsys, *edited, "--model", "gpt-4o")
    assert f"Tokens: about {result['tokens_old']:,} old, about {result['tokens_new']:,} new." in out
    assert "are the same as before" in out and "can be recovered" not in out
    assert "All token counts are estimates" in out and err == ""


def no_network(name: str) -> Any:
    raise ConnectionError("no route to host")


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
