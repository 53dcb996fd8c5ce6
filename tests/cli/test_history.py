"""`patchkv log`, `show` and `explain` on history files and conversation files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patchkv_agents.cli.main import main
from patchkv_agents.context import ContextHistory, load_conversation
from patchkv_agents.context.stores import SQLiteHistoryStore

LEDGER = " ".join(f"Line {n}: boat {3 * n} owes {n * n} crowns." for n in range(30))
NASTY = "[bold red]x[/] :smile: \x1b[31m\x07\u202e 日本語"


def messages(result: str = LEDGER, clock: str = "08:15") -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "ledger", "arguments": "{}"}}
    return [
        {"role": "system", "content": f"You keep the books. It is {clock}."},
        {"role": "user", "content": "Who owes?", "name": "clerk"},
        {"role": "assistant", "content": "", "reasoning": "Look it up.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
        {"role": "user", "content": f"Name them. {NASTY}"},
    ]


@pytest.fixture(autouse=True)
def one_tokenizer(smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the embedded tokenizer once for all tests, not at each call of the command."""
    from patchkv_agents.backends.transformers import loading

    monkeypatch.setattr(loading, "load_tokenizer", lambda name: smollm2_tokenizer)


class Histories:
    """A file with the thread `books` (three versions and a branch) and `books` of a subagent."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "agent.db"
        store = SQLiteHistoryStore(self.path)
        history = ContextHistory(store=store, thread="books")
        self.first = history.commit(messages()).id
        self.ticked = history.commit(messages(clock="08:16")).id
        self.replaced = history.replace(3, "[cleared]", author="pruner [x]").id
        history.checkout(self.first)
        history.branch("what if")
        self.branched = history.commit([*messages(), {"role": "assistant", "content": "Two."}]).id
        ContextHistory(store=store, thread="books", namespace="auditor").commit(messages())
        store.close()

    def run(self, command: str, *argv: str) -> list[str]:
        return [command, str(self.path), *argv]


@pytest.fixture
def histories(tmp_path: Path) -> Histories:
    return Histories(tmp_path)


def call(capsys: pytest.CaptureFixture[str], argv: list[str], status: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    captured = capsys.readouterr()
    assert (stopped.value.code or 0) == status, captured.err
    assert "Traceback" not in captured.err
    if status:
        assert captured.out == ""
    return captured.out, captured.err


def call_json(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict[str, Any]:
    out, err = call(capsys, [*argv, "--json"])
    assert err == ""
    result: dict[str, Any] = json.loads(out)  # fails if anything else stands on stdout
    return result


def test_log_lists_versions_newest_first(
    histories: Histories, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = call(capsys, histories.run("log", "books"))
    lines = out.splitlines()
    ids = [histories.branched, histories.replaced, histories.ticked, histories.first]
    assert [line.split()[0] for line in lines if line.startswith("0")] == ids
    assert lines[0] == "4 versions of thread books"
    assert f"{histories.branched}  (what if)" in lines
    assert f"{histories.replaced}  (main)" in lines
    assert "  rewrite_system: old message 0 -> new message 0 (in part); inferred" in lines
    declared = "  replace_tool_result: old message 3 -> new message 3; declared by pruner [x]"
    assert declared in lines
    assert f"5 messages, after {histories.first}" in out


def test_log_as_json(histories: Histories, capsys: pytest.CaptureFixture[str]) -> None:
    before = histories.path.read_bytes()
    result = call_json(capsys, histories.run("log", "books"))
    assert (result["thread"], result["namespace"]) == ("books", "")
    assert result["branches"] == {"main": histories.replaced, "what if": histories.branched}
    branched, replaced, ticked, first = result["versions"]
    assert [v["id"] for v in (first, branched)] == [histories.first, histories.branched]
    assert branched["parents"] == ticked["parents"] == [histories.first]
    assert (first["parents"], first["messages"], branched["messages"]) == ([], 5, 6)
    assert replaced["branches"] == ["main"] and ticked["branches"] == []
    (edit,) = replaced["edits"]
    assert edit["kind"] == "replace_tool_result" and edit["declared"] is True
    assert (edit["old_index"], edit["new_index"], edit["author"]) == (3, 3, "pruner [x]")
    assert edit["tool_call_ids"] == ["c1"]
    assert histories.path.read_bytes() == before


def test_log_without_a_thread_lists_the_threads(
    histories: Histories, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(histories.path)
    out, _ = call(capsys, ["log", path])
    assert out.splitlines()[0] == f"2 threads in {path}"
    assert out.splitlines()[1:] == [
        "  books: 4 versions",
        "  books --namespace auditor: 1 version",
    ]
    result = call_json(capsys, ["log", path])
    assert result["threads"][1] == {"thread": "books", "namespace": "auditor", "versions": 1}


def test_log_of_a_branch_and_of_a_namespace(
    histories: Histories, capsys: pytest.CaptureFixture[str]
) -> None:
    result = call_json(capsys, histories.run("log", "books", "--branch", "what if"))
    assert [v["id"] for v in result["versions"]] == [histories.branched, histories.first]
    result = call_json(capsys, histories.run("log", "books", "--namespace", "auditor"))
    assert result["namespace"] == "auditor" and len(result["versions"]) == 1
    assert call(capsys, histories.run("log", "books", "--namespace", "auditor"))[0].startswith(
        "1 version of thread books (auditor)"
    )


def test_neighbouring_edits_of_a_kind_share_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SQLiteHistoryStore(tmp_path / "a.db")
    history = ContextHistory(store=store, thread="t")
    history.commit(messages()[:1])
    history.commit(messages())
    store.close()
    out, _ = call(capsys, ["log", str(tmp_path / "a.db"), "t"])
    assert "  append: new messages 1-4; inferred" in out.splitlines()


def test_show_finds_a_version_by_what_names_it(
    histories: Histories, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (histories.first, histories.first[-7:], histories.first[:-3]):
        assert call_json(capsys, histories.run("show", "books", name))["id"] == histories.first
    assert call_json(capsys, histories.run("show", "books", "main"))["id"] == histories.replaced
    _, err = call(capsys, histories.run("show", "books", "0"), status=2)
    assert "4 versions" in err and "more of the id" in err
    _, err = call(capsys, histories.run("show", "books", "no such"), status=2)
    assert "'no such'" in err and "main, what if" in err


def test_show_for_people(histories: Histories, capsys: pytest.CaptureFixture[str]) -> None:
    """Contents are shown as they are, without what would change the terminal."""
    out, _ = call(capsys, histories.run("show", "books", histories.first))
    lines = out.splitlines()
    assert lines[0] == histories.first
    assert "0 system" in lines and "1 user (name clerk)" in lines
    assert "3 tool (answers c1)" in lines
    assert "  calls ledger:" in lines and "  reasoning:" in lines and "  Look it up." in lines
    assert "  Name them. [bold red]x[/] :smile: [31m 日本語" in lines
    assert not {"\x1b", "\x07", "\u202e"} & set(out)
    assert LEDGER not in out and f"({len(LEDGER):,} characters; --full shows all)" in out
    full, _ = call(capsys, histories.run("show", "books", histories.first, "--full"))
    assert LEDGER in full


def test_names_of_calls_cannot_change_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were printed as they are; a model may have made them up."""
    with SQLiteHistoryStore(tmp_path / "h.db") as store:
        call_ = {"id": "c\x1b[2J", "name": "f\x1b[2J", "args": {"x\x1b[2J": "\x1b"}}
        messages = [{"role": "assistant", "content": None, "tool_calls": [call_]}]
        ContextHistory(store, thread="t").commit(messages)
    out, _ = call(capsys, ["show", str(tmp_path / "h.db"), "t", "main"])
    assert "  calls f[2J:" in out.splitlines() and "\x1b" not in out


def test_show_as_json_is_a_conversation_file(
    histories: Histories, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for version in (histories.first, histories.ticked):
        out, _ = call(capsys, histories.run("show", "books", version, "--json"))
        files.append(tmp_path / f"{version}.json")
        files[-1].write_text(out)
    assert load_conversation(files[0]).messages[4].text == f"Name them. {NASTY}"
    result = call_json(capsys, ["diff", *map(str, files)])
    assert [edit["kind"] for edit in result["edits"]] == ["rewrite_system"]


def test_explain_names_the_clock(histories: Histories, capsys: pytest.CaptureFixture[str]) -> None:
    argv = histories.run("explain", "books", "--version", histories.ticked)
    result = call_json(capsys, argv)
    assert (result["old"], result["new"]) == (histories.first, histories.ticked)
    assert result["cause"] == "volatile_text" and result["field"] == "content"
    assert "'08:15' became '08:16'" in result["detail"]
    assert (result["message_old"], result["message_new"]) == (0, 0)
    assert result["edit"]["kind"] == "rewrite_system" and result["edit"]["declared"] is False
    assert result["text_before"].endswith("08:1")
    assert (result["text_old"][:2], result["text_new"][:2]) == ("5.", "6.")
    assert result["prefix"] + result["lost_tokens"] == result["tokens_new"]
    assert 0 < result["recoverable_tokens"] == result["lost_tokens"] - 1
    assert result["later"] == [] and result["verified"] is True
    assert "estimate" not in result
    out, _ = call(capsys, argv)
    assert f"The exact prefix ends at token {result['prefix']}." in out
    assert "first differing token: '5' became '6'" in out
    assert f"Cause: {result['summary']} [volatile_text]" in out
    assert f"What to do: {result['remedy']}" in out


def test_explain_takes_the_newest_version_and_any_other_to_compare_with(
    histories: Histories, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = call_json(capsys, histories.run("explain", "books"))
    assert (newest["old"], newest["new"]) == (histories.ticked, histories.replaced)
    assert newest["cause"] == "results_cleared"
    assert newest["edit"]["author"] == "pruner [x]"  # declared: taken from the history
    both = call_json(capsys, histories.run("explain", "books", "--against", histories.first))
    assert both["cause"] == "volatile_text" and both["new"] == histories.replaced
    assert [finding["cause"] for finding in both["later"]] == ["results_cleared"]
    out, _ = call(capsys, histories.run("explain", "books", "--against", histories.first))
    assert "an old tool result was cleared [results_cleared]: old message 3" in out
    lost = call_json(capsys, histories.run("explain", "books", "--version", "what if"))
    assert lost["cause"] == "nothing_lost"
    out, _ = call(capsys, histories.run("explain", "books", "--version", "what if"))
    assert "Nothing was lost" in out and "Cause" not in out


def test_explain_conversation_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(messages()))
    new.write_text(json.dumps(messages(result="[gone]")))
    argv = ["explain", "--old", str(old), "--new", str(new)]
    result = call_json(capsys, argv)
    assert (result["old"], result["new"]) == (str(old), str(new))
    assert result["cause"] == "results_cleared" and result["message_new"] == 3

    def no_network(name: str) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("tiktoken.get_encoding", no_network)
    hosted = call_json(capsys, [*argv, "--model", "gpt-4o"])
    assert hosted["cause"] == "results_cleared" and hosted["estimate"] is True
    assert "All token counts are estimates" in call(capsys, [*argv, "--model", "gpt-4o"])[0]


def test_redacted_text_is_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even where the old version still has it."""
    store = SQLiteHistoryStore(tmp_path / "a.db")
    history = ContextHistory(store=store, thread="t")
    history.commit(messages(result="The code is 4471-HERON. " + LEDGER))
    history.redact(3, "The code is [masked]. " + LEDGER, forget=False)
    store.close()
    argv = ["explain", str(tmp_path / "a.db"), "t"]
    assert call_json(capsys, argv)["cause"] == "redacted"
    for more in ([], ["--json"]):
        out, _ = call(capsys, [*argv, *more])
        assert "HERON" not in out


@pytest.mark.parametrize("command", ["log", "show", "explain"])
def test_unknown_threads_and_unusable_files(
    command: str, histories: Histories, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = ["main"] if command == "show" else []
    _, err = call(capsys, histories.run(command, "boks", *version), status=2)
    assert "no thread boks" in err and "books, books --namespace auditor" in err
    missing = tmp_path / "none.db"
    _, err = call(capsys, [command, str(missing), "books", *version], status=2)
    assert str(missing) in err and not missing.exists()
    text = tmp_path / "notes.txt"
    text.write_text("These are notes. " * 20)
    _, err = call(capsys, [command, str(text), "books", *version], status=1)
    assert str(text) in err and err.count("\n") == 1


def test_wrong_usage_says_what_is_right(
    histories: Histories, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv, part in (
        (["explain"], "patchkv explain DB THREAD"),
        (["explain", str(histories.path)], "patchkv explain DB THREAD"),
        (["explain", "--old", "a.json"], "belong together"),
        (histories.run("explain", "books", "--old", "a.json", "--new", "b.json"), "either"),
        (histories.run("explain", "books", "--version", histories.first), "is the first one"),
        (histories.run("log", "books", "--branch", "man"), "main, what if"),
    ):
        _, err = call(capsys, argv, status=2)
        assert part in err and err.startswith("patchkv: ")


def test_log_starts_fast_and_prints_in_any_encoding(histories: Histories) -> None:
    """It needs no tokenizer; a character that the terminal lacks was a traceback."""
    code = (
        "import sys\n"
        "from patchkv_agents.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    print(sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *histories.run("show", "books", "main")],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0 and done.stderr.strip() == b"[]", done.stderr
    assert b"\\u65e5\\u672c" in done.stdout
