"""`patchkv validate` and `patchkv profile show`, on random weights."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_type_hints

import pytest

from patchkv_agents.cli import validate as command
from patchkv_agents.cli.main import main
from patchkv_agents.cli.pair_sources import PairSources
from patchkv_agents.cli.profile_view import show
from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError
from patchkv_agents.profiling.gate import Thresholds, calibration_marks
from patchkv_agents.profiling.pair_readers import read_pairs
from patchkv_agents.recovery import RecoveryPolicy, Window
from patchkv_agents.recovery.profile import Profile

from ..engine.models import tiny_engine
from ..profiling.profiles import passed, profile_of

NEARLY_ALL = RecoveryPolicy("patchkv", Window(240, tail_tokens=64, block_size=32))


def messages(weather: str):
    return [
        {"role": "user", "content": f"It {weather} today. What follows?"},
        {"role": "user", "content": "Say why that is, and what else you know of the town. " * 27},
    ]


def write_pairs(file: Path, *weathers: str) -> Path:
    lines = [
        {"old": messages("rains"), "new": messages(each), "task": each, "kind": "refresh"}
        for each in weathers
    ]
    # Each task has an old context of its own: tasks that share one count as the same.
    for number, line in enumerate(lines):
        line["old"] = messages(f"rains {number}")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def engine(smollm2_tokenizer, monkeypatch) -> Engine:
    plain = tiny_engine(smollm2_tokenizer, 1024)

    def load(name: str, **options) -> Engine:
        return Engine(plain.adapter.model, plain.tokenizer, **options)

    monkeypatch.setattr(Engine, "from_pretrained", load)
    return plain


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["validate", "some-model", *arguments])
    code = caught.value.code
    assert isinstance(code, int)
    return code


def test_a_result_is_printed_and_recorded(engine, tmp_path: Path, capsys):
    pairs = write_pairs(tmp_path / "pairs.jsonl", "snows", "hails", "is foggy")
    fitted = [pair for pair in read_pairs(pairs).pairs if pair.task == "is foggy"]
    profile = profile_of(
        NEARLY_ALL,
        fingerprint=engine.fingerprint,
        fit={"calibration_tasks": calibration_marks(fitted)},
    )
    file = tmp_path / "profile.json"
    profile.save(file)
    few = "--least-pairs", "2", "--least-tasks", "2"
    options = "--profile", str(file), "--pairs", str(pairs), "--json"

    assert run(*options) == 1  # two pairs are too few
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["passed"] is False and "12 are needed" in document["reasons"][0]
    assert document["thresholds"] == asdict(Thresholds())
    assert [each["id"] for each in document["skipped"]] == ["line 3"]
    assert "of 2" in printed.err  # progress
    assert not Profile.load(file).has_passed and Profile.load(file).validation is not None

    other = tmp_path / "other.json"
    assert run(*options[:-1], *few, "--out", str(other)) == 0
    printed = capsys.readouterr()
    assert "first token kl median" in printed.out and "passed:" in printed.out
    assert "left out 1 pair" in printed.err
    assert Profile.load(other).has_passed and not Profile.load(file).has_passed


def test_a_limit_counts_pairs_that_the_profile_was_not_fitted_to(engine, tmp_path: Path, capsys):
    """Also where the first ones of the file are those that it was fitted to."""
    weathers = ("snows", "hails", "is foggy", "dawns", "blows")
    pairs = write_pairs(tmp_path / "pairs.jsonl", *weathers)
    fitted = read_pairs(pairs).pairs[:3]
    file = tmp_path / "profile.json"
    fit = {"calibration_tasks": calibration_marks(fitted)}
    profile_of(NEARLY_ALL, fingerprint=engine.fingerprint, fit=fit).save(file)
    options = "--profile", str(file), "--pairs", str(pairs), "--json", "--least-pairs", "1"
    assert run(*options, "--least-tasks", "1", "--limit", "1") == 0
    assert json.loads(capsys.readouterr().out)["measures"]["top1_agree"]["n"] == 1
    assert run(*options, "--least-tasks", "1", "--kl-median", "1", "--limit", "9") == 0
    assert json.loads(capsys.readouterr().out)["measures"]["top1_agree"]["n"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pairs", "{folder}/none"], "no file"),
        ([], "name the pairs"),
        (["--quick", "--data", "{folder}/profile.json"], "one --data for each"),
        (["--quick", "--top1", "1.5"], "--top1"),
    ],
)
def test_wrong_use_is_told_before_a_model_is_loaded(tmp_path, capsys, arguments, words):
    file = tmp_path / "profile.json"
    profile_of().save(file)
    given = [part.format(folder=tmp_path) for part in arguments]
    assert run("--profile", str(file), *given) == 2
    printed = capsys.readouterr()
    assert words in printed.err and not printed.out


def test_another_models_profile_is_wrong_use(engine, tmp_path: Path, capsys):
    file = tmp_path / "profile.json"
    profile_of().save(file)
    assert run("--profile", str(file), "--quick") == 2
    assert "patchkv profile" in capsys.readouterr().err


def test_the_help_names_the_gates_limits():
    """They are not imported for it: that would take the help as long as loading torch."""
    parameters = get_type_hints(command.validate, include_extras=True)
    names = ("kl_median", "kl_p95", "top1", "least_pairs", "least_tasks")
    for name, limit in zip(names, asdict(Thresholds()).values(), strict=True):
        (option,) = parameters[name].__metadata__
        assert option.help.endswith(f"; {limit:g} if left out.")


def test_episodes_become_pairs(smollm2_tokenizer, shared_dir: Path):
    data = next(iter(sorted(shared_dir.glob("data/**/*hotpot*"))), None)
    if data is None or not data.is_file():
        pytest.skip("no HotpotQA file")
    sources = PairSources(
        episodes=["hotpotqa"], data=[data], limit=1, tokens=900, edits="refresh, flip"
    )
    (found,) = sources.read(smollm2_tokenizer)
    assert [pair.kind for pair in found.pairs] == ["refresh", "flip"]
    assert found.pairs[0].dataset == "hotpotqa" and found.pairs[1].stale_answers
    with pytest.raises(InputError, match="No episodes of kind"):
        replace(sources, edits="rewrite").read(smollm2_tokenizer)


def test_a_profile_is_shown(tmp_path: Path, capsys):
    file = tmp_path / "profile.json"
    sweep = [{"tau": 0.1, "kl": 0.02}, {"tau": 0.2, "kl": None}]
    fit = {"calibration_tasks": ["a"], "window": {"tau": 0.25, "met": True, "sweep": sweep}}
    passed(profile_of(fit=fit), "the median is 2 nats").save(file)
    show(str(file))
    printed = capsys.readouterr().out
    for words in (
        "smollm2", "as its size predicts, at least 32", "window behind the edit", "met: yes",
        "patchkv_published", "0.02", "NOT PASSED: validation found: the median is 2 nats",
        "patchkv validate",
    ):  # fmt: skip
        assert words in printed
    assert "calibration" not in printed
    show(str(file), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["has_passed"] is False and Profile.from_json(document_of(document)).fit == fit


def test_limits_of_ones_own_are_named(tmp_path: Path, capsys):
    file = tmp_path / "profile.json"
    usual = passed(profile_of())
    assert usual.validation is not None
    limits = {**asdict(Thresholds()), "first_token_kl_median": 0.5}
    replace(usual, validation=replace(usual.validation, thresholds=limits)).save(file)
    show(str(file))
    printed = capsys.readouterr().out
    assert "PASSED" in printed and "NOT PASSED" not in printed
    assert printed.count("By a limit of its own") == 1
    assert "first token kl median 0.5, where 0.005 is usual" in " ".join(printed.split())


def document_of(shown: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in shown.items() if name != "has_passed"}
