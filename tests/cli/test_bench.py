"""`patchkv bench`: options, tables, JSON and files, on the benchmarks that need no model."""

from __future__ import annotations

import json

import pytest

from patchkv_agents.cli.main import main

PLAN = ("plan", "--tokens", "300,500", "--layers", "2", "--rounds", "1")
RESTORE = ("restore", "--tokens", "64", "--formats", "f16,k8v8", "--layers", "2", "--rounds", "1")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit:
        main(["bench", *argv])
    output = capsys.readouterr()
    return int(exit.value.code or 0), output.out, output.err


def test_json_is_the_only_thing_on_standard_output_and_what_the_file_holds(capsys, tmp_path):
    code, out, err = run(capsys, *PLAN, "--json", "--out", str(tmp_path))
    assert code == 0
    document = json.loads(out)
    assert document["bench"] == "plan" and len(document["points"]) == 2
    stored = json.loads((tmp_path / "bench-plan.json").read_text())
    assert stored["points"] == document["points"]
    assert "500 tokens" in err


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


@pytest.mark.parametrize(
    "argv, reason",
    [
        (("plan", "--tokens", "12,many"), "--tokens takes values with commas"),
        (("plan", "--tokens", "0"), "--tokens takes numbers from 1"),
        (("plan", "--tokens", ","), "--tokens needs at least one value"),
        (("restore", "--formats", "int3"), "no format 'int3'"),
        (("restore", "--formats", ","), "--formats needs at least one value"),
        (("restore", "--dtype", "int7"), "no dtype 'int7'"),
        (("plan", "--head-dim", "20"), "head_dim is 20"),
        (("plan", "--device", "abacus"), "no device 'abacus' here"),
        (("resume", "--sweep", "depth"), "no sweep 'depth'"),
        (("resume", "--tokens", "2000"), "the length is what is swept"),
        (("resume", "--sweep", "precision", "--values", "int3"), "no precision 'int3'"),
        (("resume", "--baselines", "magic"), "no method 'magic'"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_loaded(capsys, argv, reason):
    code, out, err = run(capsys, *argv)
    assert code == 2 and not out
    assert reason in err
    assert "loading" not in err
