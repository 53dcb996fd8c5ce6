"""`patchkv bench`: options, tables, JSON and files, on the benchmarks that need no model."""

from __future__ import annotations

import json

import pytest

from patchkv_agents.cli.main import main
from patchkv_evals.benchmarks.selection import RULES
from tests.engine.models import tiny_engine

ALIGN = ("align", "--tokens", "500", "--hunks", "1,2", "--rounds", "1")
RESTORE = ("restore", "--tokens", "64", "--formats", "f16,k8v8", "--layers", "2", "--rounds", "1")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit:
        main(["bench", *argv])
    output = capsys.readouterr()
    return int(exit.value.code or 0), output.out, output.err


def test_json_is_the_only_thing_on_standard_output_and_what_the_file_holds(capsys, tmp_path):
    code, out, err = run(capsys, *ALIGN, "--json", "--out", str(tmp_path))
    assert code == 0
    document = json.loads(out)
    assert document["bench"] == "align" and len(document["points"]) == 4
    stored = json.loads((tmp_path / "bench-align.json").read_text())
    assert stored["points"] == document["points"]
    assert "zipf, 500 tokens, 2 edits" in err


@pytest.mark.parametrize("columns", ["60", "140"])
def test_people_get_every_figure_with_the_machine(capsys, monkeypatch, columns, tmp_path):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run(capsys, *RESTORE, "--out", str(tmp_path))
    assert code == 0
    document = json.loads((tmp_path / "bench-restore.json").read_text())
    for point in document["points"]:
        assert point["format"] in out
        assert f"{point['payload_ratio']:.1%}" in out and f"{point['relative']:.2f}" in out
    assert document["versions"]["torch"] in out and "threads" in out


def test_analyses_sum_up_what_the_model_did(capsys, monkeypatch, smollm2_tokenizer, tmp_path):
    engine = tiny_engine(smollm2_tokenizer, 4096)
    monkeypatch.setattr("patchkv_agents.cli.bench._engine", lambda model: engine)
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = run(
        capsys, "selection", "--tokens", "600", "--draws", "1", "--out", str(tmp_path)
    )
    assert code == 0
    for rule in RULES:
        assert rule in out
    assert (tmp_path / "bench-selection.json").exists()
    code, out, _ = run(capsys, "sensitivity", "--tokens", "400", "--json")
    document = json.loads(out)
    assert code == 0 and document["bench"] == "sensitivity"
    assert document["config"]["format"] == "k8v4"


@pytest.mark.parametrize(
    "argv, reason",
    [
        (("align", "--tokens", "12,many"), "--tokens takes values with commas"),
        (("align", "--tokens", "0"), "--tokens takes numbers from 1"),
        (("align", "--hunks", ","), "--hunks needs at least one value"),
        (("restore", "--formats", "int3"), "no format 'int3'"),
        (("restore", "--formats", ","), "--formats needs at least one value"),
        (("restore", "--dtype", "int7"), "no dtype 'int7'"),
        (("plan", "--head-dim", "20"), "head_dim is 20"),
        (("plan", "--device", "abacus"), "no device 'abacus' here"),
        (("resume", "--sweep", "depth"), "no sweep 'depth'"),
        (("resume", "--tokens", "2000"), "the length is what is swept"),
        (("resume", "--sweep", "precision", "--values", "int3"), "no precision 'int3'"),
        (("resume", "--baselines", "magic"), "no method 'magic'"),
        (("drift", "--dataset", "hotpotqa"), "--data and --dataset"),
        (("sensitivity", "--format", "f16"), "no format 'f16'"),
        (("selection", "--budget", "2"), "the budget is 2.0"),
        (("selection", "--edits", ","), "--edits needs at least one value"),
        (
            ("selection", "--data", "d.jsonl", "--dataset", "x", "--edits", "magic"),
            "no kind 'magic'",
        ),
    ],
)
def test_wrong_usage_is_told_before_anything_is_loaded(capsys, argv, reason):
    code, out, err = run(capsys, *argv)
    assert code == 2 and not out
    assert reason in err
    assert "loading" not in err
