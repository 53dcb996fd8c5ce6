"""`patchkv eval` on a tiny random model and rows of the tests' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from patchkv_agents.cli.main import main
from patchkv_agents.context import Conversation, parse_messages
from patchkv_agents.engine import Engine
from patchkv_agents.profiling.gate import calibration_marks
from patchkv_agents.profiling.pairs import ContextPair
from patchkv_agents.recovery import RecoveryPolicy
from tests.engine.models import tiny_engine
from tests.evals.samples import ROWS
from tests.profiling.profiles import profile_of


@pytest.fixture(scope="module")
def model(smollm2_tokenizer: PreTrainedTokenizerBase, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_engine(smollm2_tokenizer, 4096).adapter.model.save_pretrained(folder)
    smollm2_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    lines = [
        json.dumps(
            {
                "id": row.id,
                "question": row.question,
                "answers": row.answers,
                "paragraphs": [
                    {"title": p.title, "text": p.text, "is_supporting": p.is_gold}
                    for p in row.passages
                ],
            }
        )
        for row in ROWS
    ]
    path.write_text("\n".join(lines))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as exit:
        main(["eval", *argv])
    output = capsys.readouterr()
    assert (exit.value.code or 0) == status, output.err
    return output.out, output.err


def test_random_rows_are_others_for_each_seed(capsys, model, data, tmp_path):
    """Each release reports on rows drawn afresh; the rows' order in the file favors none."""
    options = ("--dataset", "hotpotqa", "--data", data, "--model", model, "--tokens", "700")
    options += ("--limit", "2", "--methods", "direct_reuse", "--rows", "random")
    drawn = []
    for seed in ("0", "1", "2"):
        out = tmp_path / seed
        run(capsys, *options, "--seed", seed, "--out", str(out))
        lines = (out / "results.jsonl").read_text().splitlines()
        drawn.append(tuple(dict.fromkeys(json.loads(line)["row"] for line in lines)))
    assert len(set(drawn)) > 1 and all(len(rows) == 2 for rows in drawn)
    again = tmp_path / "again"
    run(capsys, *options, "--seed", "2", "--out", str(again))
    lines = (again / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["row"] for line in lines} == set(drawn[2])


def test_a_run_its_continuation_and_the_comparison(capsys, model, data, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = str(tmp_path / "results")
    options = ("--dataset", "hotpotqa", "--data", data, "--model", model, "--out", out)
    options += ("--tokens", "700", "--edit", "refresh", "--edit", "flip")

    shown, progress = run(capsys, *options, "--limit", "1", "--methods", "patchkv")
    assert "of 2: refresh of row-0" in progress
    lines = [line.split() for line in shown.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["patchkv"]] == ["2", "1", "1"]
    assert "…" not in shown

    shown, _ = run(capsys, *options, "--limit", "2", "--methods", "patchkv,prefix_cache", "--json")
    document = json.loads(shown)
    assert document["episodes_left"] == 0
    assert document["methods"]["patchkv"]["f1"]["n"] == 4
    assert document["methods"].keys() == {"full_prefill", "patchkv", "prefix_cache"}
    assert document["config"]["data"] == data
    assert (document["episodes"], document["calibrated_on"]) == (4, None)

    shown, _ = run(capsys, out, out, "--json")
    (pooled,) = json.loads(shown)["models"]
    assert (pooled["episodes"], pooled["methods"]["patchkv"]["n"]) == (4, 4)
    assert pooled["methods"]["patchkv"]["speedups"].keys() == {"prefix_cache"}
    shown, _ = run(capsys, out)
    assert "4 episodes of 2 rows in 1 run" in shown
    assert "open  resume TTFT against cacheblend" in shown

    _, errors = run(capsys, *options, "--rows", "random", status=2)
    assert "holds a run with rows 'file', and this one has 'random'" in errors
    _, errors = run(capsys, *options, "--rows", "some", status=2)
    assert "no rows 'some'" in errors
    _, errors = run(capsys, *options, "--seed", "1", status=2)
    assert "holds a run with seed 0, and this one has 1" in errors


def test_a_run_in_which_everything_fails(capsys, model, data, tmp_path):
    options = ("--dataset", "hotpotqa", "--data", data, "--model", model, "--tokens", "50")
    shown, _ = run(capsys, *options, "--out", str(tmp_path), "--methods", "patchkv", status=1)
    assert f"{len(ROWS)} without result (row, refresh): more than 50 tokens are needed" in shown
    assert "12 failures" in run(capsys, str(tmp_path))[0]


def test_a_spent_budget_is_told(capsys, model, data, tmp_path):
    options = ("--dataset", "hotpotqa", "--data", data, "--model", model, "--limit", "3")
    _, errors = run(capsys, *options, "--out", str(tmp_path), "--budget-minutes", "0")
    assert "about 3 episodes left" in errors


def test_episodes_that_the_profile_was_fitted_to_are_counted_and_told(
    capsys, model, data, tmp_path
):
    """By the task's name, in whatever context it comes: the profile saw another length."""
    row = ROWS[0]
    old, new = (Conversation(parse_messages([{"role": "user", "content": c}])) for c in "ab")
    marks = calibration_marks([ContextPair("x", row.id, "flip", "hotpotqa", old, new)])
    fingerprint = Engine.from_pretrained(model, policy=RecoveryPolicy.exact()).fingerprint
    file = tmp_path / "profile.json"
    profile_of(fingerprint=fingerprint, fit={"calibration_tasks": marks}).save(file)
    options = ("--dataset", "hotpotqa", "--data", data, "--model", model, "--tokens", "700")
    options += ("--methods", "patchkv", "--out", str(tmp_path / "out"), "--json")
    options += ("--recovery-profile", str(file))
    shown, told = run(capsys, *options, "--limit", "2")
    document = json.loads(shown)
    assert (document["calibrated_on"], document["episodes"]) == (1, 2)
    (warning,) = [line for line in told.splitlines() if "fitted" in line]
    assert "1 of the 2 episodes" in warning
    results = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    seen = {(line["row"], line["calibrated_on"]) for line in map(json.loads, results)}
    assert seen == {(row.id, True), (ROWS[1].id, False)}

    profile_of(fingerprint=fingerprint, fit={}).save(file)
    assert "does not say what it was fitted to" in run(capsys, *options, status=2)[1]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ((), "name --dataset and --out"),
        (("--dataset", "hotpotqa"), "name --dataset and --out"),
        (("nowhere",), "nowhere holds no config.json"),
        (("nowhere", "--dataset", "hotpotqa"), "or --dataset and --out to run"),
        (("--dataset", "hotpotqa", "--out", "x", "--methods", "best"), "no method 'best'"),
        (("--dataset", "hotpotqa", "--out", "x", "--edit", "swap"), "No episodes of kind 'swap'"),
        (("--dataset", "hotpotqa", "--out", "x", "--recovery-profile", "no"), "no profile no"),
        (("--dataset", "other", "--out", "x", "--data", "y"), "'other' is not known"),
    ],
)
def test_wrong_usage(capsys, tmp_path, monkeypatch, argv: tuple[str, ...], told: str):
    monkeypatch.chdir(tmp_path)
    assert told in run(capsys, *argv, status=2)[1]
    assert not Path("x").exists()


def test_groups_of_methods():
    from patchkv_agents.cli.evaluate import _policies
    from patchkv_agents.recovery.named import method_names

    profile = profile_of()
    made = _policies("patchkv,patchkv_published,prefix_cache", profile)
    assert [each.policy for each in made[:2]] == [profile.policy, profile.published] and made[
        2
    ] == _policies("prefix_cache")[0]

    def names(text: str) -> list[str]:
        return [policy.name for policy in _policies(text)]

    assert sorted(names("all")) == sorted(method_names())
    assert names("ablations")[0] == "patchkv"
    assert set(names("main,ablations")) == set(method_names())
    assert names("patchkv, full_prefill,patchkv") == ["patchkv"]
