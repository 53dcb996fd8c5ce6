"""`patchkv profile`: a model or a command, refusals before the model loads, and its output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from patchkv_agents.cli.main import main
from patchkv_agents.engine import Engine
from patchkv_agents.profiling import calibrate as calibration
from patchkv_agents.profiling.pairs import Skipped
from patchkv_agents.progress import Progress
from patchkv_agents.recovery.profile import DataSource, Profile
from tests.engine.models import tiny_engine
from tests.profiling.profiles import passed, profile_of


def run(capsys, *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *argv])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.fixture
def calls(monkeypatch, smollm2_tokenizer):
    """Calls of `calibrate`, which returns a profile at once."""
    made = []

    def calibrate(engine, sources, work, *, config, progress):
        progress(Progress("drift: one of [two]"))
        made.append((sources, work, config))
        fit = {"pairs": {"calibration": 12}, "calibration_tasks": []}
        return profile_of(fit=fit), (Skipped("a", "too long"),)

    engine = tiny_engine(smollm2_tokenizer, 2048)
    monkeypatch.setattr(calibration, "calibrate", calibrate)
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_args, **_options: engine)
    return made


def test_a_model_needs_no_command_and_show_is_one(capsys, calls, tmp_path: Path):
    out = tmp_path / "p.json"
    status, printed, errors = run(capsys, "smollm2", "--quick", "--limit", "2", "--out", str(out))
    assert status == 0 and f"Written to {out}" in printed
    assert "drift: one of [two]" in errors and "left out 1 pair: too long" in errors
    ((source,), work, config) = calls[0]
    assert len(source.pairs) == 8 and work == tmp_path / "p.json.work"
    assert config.most_repaired == 0.10 and config.precision
    assert run(capsys, "run", "smollm2", "--quick", "--out", str(out))[0] == 0
    status, printed, _ = run(capsys, "show", str(out))
    assert status == 0 and "NOT PASSED" in printed
    assert len(calls) == 2


def test_a_repeated_run_keeps_the_pass_of_what_it_found_again(capsys, calls, tmp_path: Path):
    out = tmp_path / "p.json"
    assert run(capsys, "smollm2", "--quick", "--out", str(out))[0] == 0
    passed(Profile.load(out)).save(out)
    assert run(capsys, "smollm2", "--quick", "--out", str(out))[0] == 0
    assert Profile.load(out).has_passed
    other = replace(Profile.load(out), data=(DataSource("other", "ef" * 32, 4, 4),))
    passed(other).save(out)
    assert run(capsys, "smollm2", "--quick", "--out", str(out))[0] == 0
    assert not Profile.load(out).has_passed


def test_another_file_is_not_overwritten(capsys, calls, tmp_path: Path):
    out = tmp_path / "notes.txt"
    out.write_text("of somebody")
    status, _, errors = run(capsys, "smollm2", "--quick", "--out", str(out))
    assert status == 2 and "is no profile" in errors
    assert out.read_text() == "of somebody" and calls == []


def test_options_may_come_first_and_json_is_one_document(capsys, calls, tmp_path: Path):
    out = tmp_path / "p.json"
    status, printed, _ = run(
        capsys, "--quick", "--no-precision", "--json", "--out", str(out), "smollm2"
    )
    document = json.loads(printed)
    assert status == 0 and document["skipped"] == [{"id": "a", "reason": "too long"}]
    assert document["policy"] == json.loads(out.read_text())["policy"]
    assert not calls[0][2].precision


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "name the pairs"),
        (("--pairs", "/no/such.jsonl"), "no file"),
        (("--quick", "--most-repaired", "0"), "leaves nothing"),
        (("--quick", "--out", "/no/such/p.json"), "no folder"),
    ],
)
def test_what_is_wrong_is_told_before_the_model_loads(capsys, monkeypatch, arguments, told):
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_args, **_options: pytest.fail("loaded"))
    status, printed, errors = run(capsys, "smollm2", "--out", "p.json", *arguments)
    assert (status, printed) == (2, "") and told in errors


def test_help_names_both_uses(capsys):
    status, printed, _ = run(capsys, "--help")
    assert status == 0 and "run" in printed and "show" in printed
