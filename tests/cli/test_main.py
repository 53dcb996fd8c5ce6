"""The command line as a whole: errors, exit statuses, start-up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from patchkv_agents import __version__
from patchkv_agents.cli import main as cli
from patchkv_agents.cli.main import app, main
from patchkv_agents.errors import InputError, PatchKVError

CONVERSATION = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})


def run(*argv: str) -> int:
    """Run the command line in this process; returns its exit status."""
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    code = stopped.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


@pytest.fixture
def broken_app(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """An app with one command, `fail`, that raises the parameter."""
    broken = typer.Typer(pretty_exceptions_enable=False)
    broken.callback()(lambda: None)

    @broken.command()
    def fail() -> None:
        raise request.param

    monkeypatch.setattr(cli, "app", broken)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"patchkv {__version__}\n"


def test_no_arguments_shows_the_commands() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "Usage: patchkv" in result.output and "diff" in result.output


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(option) == 0
    assert "diff" in capsys.readouterr().out
    assert run("diff", option) == 0
    assert "--min-run" in capsys.readouterr().out


def test_help_loads_nothing_slow() -> None:
    code = (
        "import sys\n"
        "from patchkv_agents.cli.main import main\n"
        "try:\n"
        "    main(['diff', '--help'])\n"
        "except SystemExit:\n"
        "    print('LOADED', sorted({'torch', 'transformers', 'sklearn'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []"


@pytest.mark.parametrize(
    "argv",
    [
        ["no-such-command"],
        ["--no-such-option"],
        ["diff"],
        ["diff", "one.json"],
        ["diff", "one.json", "two.json", "three.json"],
        ["diff", "one.json", "two.json", "--min-run", "0"],
        ["diff", "one.json", "two.json", "--min-run", "many"],
    ],
    ids=" ".join,
)
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert "Usage: patchkv" in captured.err and "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"{not json",
        b"\xff\xfe\x00",
        b"42",
        b"[]",
        b'{"tools": []}',
        b'{"messages": {}}',
        b'{"messages": []}',
        b'{"messages": ["hi"]}',
        b'{"messages": [{"content": "no role"}]}',
        b'{"messages": [{"role": "user", "content": 7}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "tools": 3}',
    ],
    ids=lambda content: "missing file" if content is None else repr(content),
)
def test_unusable_files(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Either file may be the wrong one; the message names it."""
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(CONVERSATION)
    if content is not None:
        bad.write_bytes(content)
    for argv in (["diff", str(bad), str(good)], ["diff", str(good), str(bad), "--json"]):
        assert run(*argv) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("patchkv: ") and captured.err.count("\n") == 1
        assert "bad.json" in captured.err


def test_a_directory_is_not_a_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("diff", str(tmp_path), str(tmp_path)) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_unknown_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.json"
    file.write_text(CONVERSATION)
    assert run("diff", str(file), str(file), "--model", str(tmp_path / "no-model")) == 2
    captured = capsys.readouterr()
    assert "no-model" in captured.err and "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("broken_app", "status", "stderr"),
    [
        (PatchKVError("out of [memory]: use a smaller model"), 1, "out of [memory]: use a smaller"),
        (InputError("pass a list"), 2, "pass a list"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["failure", "input", "interrupt"],
    indirect=["broken_app"],
)
def test_errors_become_exit_statuses(
    broken_app: None, status: int, stderr: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fail") == status
    captured = capsys.readouterr()
    assert captured.out == "" and stderr in captured.err and "Traceback" not in captured.err


@pytest.mark.parametrize("broken_app", [ZeroDivisionError("a bug")], indirect=True)
def test_bugs_are_not_hidden(broken_app: None) -> None:
    with pytest.raises(ZeroDivisionError):
        main(["fail"])


def test_output_that_cannot_be_written_is_one_message(tmp_path):
    """A full disk behind standard output gave a traceback."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    path = tmp_path / "a.json"
    path.write_text('[{"role": "user", "content": "hello"}]')
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "patchkv_agents.cli.main", "diff", path, path, "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert "cannot write the output" in done.stderr and "Traceback" not in done.stderr
