"""Calibration on a tiny random model: every stage, going on, the same again, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from patchkv_agents.alignment import align
from patchkv_agents.context import Conversation, parse_messages, render
from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError, PatchKVError
from patchkv_agents.profiling import calibrate as calibration
from patchkv_agents.profiling import drift_log
from patchkv_agents.profiling.calibrate import CalibrationConfig, DriftLog, calibrate
from patchkv_agents.profiling.checking import check_stretches, check_tasks
from patchkv_agents.profiling.drift import block_drift, prefilled
from patchkv_agents.profiling.pairs import ContextPair, PairSet, pair_set, split
from patchkv_agents.profiling.trials import Trials
from patchkv_agents.progress import Progress
from patchkv_agents.recovery import Published
from patchkv_agents.recovery.profile import Profile
from tests.engine.models import tiny_engine
from tests.profiling.test_trials import pair

CONFIG = CalibrationConfig(
    most_repaired=0.5,
    precision=False,
    drifts=(0.02, 0.1),
    shares=(0.9,),
    quantiles=(0.5, 0.9),
    fits=2,
    kappas=(0.0, 0.05),
    windows_and_tails=((32, 32), (32, 64)),
)


def pairs(count: int = 4) -> PairSet:
    weather = ("It rains.", "It snows.", "It hails.", "It thaws.", "It dawns.", "It blows.")
    return pair_set(
        "weather",
        [
            replace(pair(str(n), old=f"Fog {n}. " * (n + 1), new=weather[n]), dataset="d")
            for n in range(count)
        ],
    )


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer) -> Engine:
    return tiny_engine(smollm2_tokenizer, 2048)


def short_pair(id: str) -> ContextPair:
    """Of contexts with fewer than 128 tokens behind the edit."""
    contexts = []
    for word in ("rains", "snows"):
        texts = f"It {word}.", "Say why that is, and what else you know. " * 8
        messages = [{"role": "user", "content": text} for text in texts]
        contexts.append(Conversation(parse_messages(messages)))
    return ContextPair(id, id, "refresh", "d", *contexts)


class Stop(Exception):
    """An interruption."""


@pytest.fixture(scope="module")
def found(engine, tmp_path_factory):
    """A profile from a run that was interrupted once, its folder, and what each call was told."""
    work = tmp_path_factory.mktemp("calibrate") / "p.json.work"
    sources = [pairs(), pair_set("long", [pair("long", old="It rains and rains. " * 200)])]
    calls: list[list[Progress]] = [[], []]

    def stop_at_last_window(progress: Progress) -> None:
        calls[0].append(progress)
        if "predicted windows" in progress.doing and progress.done + 1 == progress.total:
            raise Stop

    with pytest.raises(Stop):
        calibrate(engine, sources, work, config=CONFIG, progress=stop_at_last_window)
    profile, skipped = calibrate(engine, sources, work, config=CONFIG, progress=calls[1].append)
    return profile, skipped, work, calls


def test_the_profile_holds_what_was_chosen_and_from_what(found, tmp_path: Path):
    profile = found[0]
    fit = profile.fit
    assert fit["pairs"] == {
        "calibration": 2, "validation": 2, "calibration_tasks": 2, "left_out": 1
    }  # fmt: skip
    assert len(fit["window"]["sweep"]) == 4 and fit["window"]["coverage"]["n_pairs"] == 2
    assert [line["kappa"] for line in fit["kappa"]["tried"]] == [0.0, 0.05]
    assert profile.published.method.kappa == fit["kappa"]["chosen"]
    assert isinstance(profile.published.method, Published)
    assert profile.published.method.window_model is not None
    assert profile.policy.method.max_repaired == 0.5
    for stage in ("lengths", "selection"):
        lines = fit[stage]["tried"]
        assert [line["policy"] for line in lines if line["chosen"]] == [fit[stage]["chosen"]]
        assert all(line["n"] == 2 for line in lines)
        assert all(line["kl_refresh"] == line["kl_log_mean"] for line in lines)
    frontier = fit["frontier"]["tried"]
    assert len({line["policy"] for line in frontier}) == len(frontier) == 11
    assert all(line["low"] <= line["kl_log_mean"] <= line["high"] for line in frontier)
    result = fit["result"]["policies"]
    assert [line["policy"] for line in result] == ["patchkv", "patchkv_published"] * 2
    assert result[2]["kl_median"] > 0 and result[2]["repair_ratio"] == result[0]["repair_ratio"]
    assert profile.data[0].pairs == 4 and not profile.has_passed
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


def test_the_same_call_goes_on_without_work_and_finds_the_same(engine, found, monkeypatch):
    profile, _, work, _ = found

    def fail(*_args, **_kwargs):
        raise AssertionError("this was done before")

    monkeypatch.setattr(Trials, "_try", fail)
    monkeypatch.setattr(DriftLog, "observe", fail)
    again, _ = calibrate(engine, [pairs()], work, config=CONFIG)
    for stage in ("window", "lengths", "selection", "kappa", "calibration_tasks"):
        assert again.fit[stage] == profile.fit[stage]
    assert (again.policy, again.published) == (profile.policy, profile.published)


def test_an_interrupted_run_goes_on_where_it_was(found):
    first, second = found[3]
    stages = [[step.doing.split(":")[0] for step in told] for told in (first, second)]
    assert stages[0] == [
        *["drift, windows and tails"] * 2,
        *["drift of validation pairs"] * 2,
        *["predicted windows"] * 2,
    ]
    assert stages[1] == ["predicted windows", *["attention and selection"] * 2, *["result"] * 2]


def test_a_pair_that_is_too_long_is_left_out_and_listed(found):
    _, skipped, _, _ = found
    assert [each.id for each in skipped] == ["long"]
    assert "the model's limit is 2,048" in skipped[0].reason


def test_the_window_uses_no_drift_of_validation_pairs(engine, found, tmp_path: Path, monkeypatch):
    validation = {each.id for each in split(pairs().pairs)[1]}
    seen: list[set[str]] = []
    sweep = calibration.sweep

    def spied(observations, **settings):
        seen.append({each.pair for each in observations})
        return sweep(observations, **settings)

    monkeypatch.setattr(calibration, "sweep", spied)
    calibrate(engine, [pairs()], found[2], config=CONFIG)
    assert len(seen) == 1 and not seen[0] & validation and len(seen[0]) == 2


def test_drift_of_shared_states_is_that_of_separate_prefills(engine, tmp_path: Path, monkeypatch):
    one = pair("one", old="A longer old result of the tool. " * 4)
    drift = DriftLog(engine, 32, tmp_path / "drift.jsonl")
    Trials(engine, [one]).run([], observe=drift.observe)
    ids = [render(each, engine.tokenizer).token_ids for each in (one.old, one.new)]
    alignment = align(*ids)
    blocks = block_drift(engine, alignment, *(prefilled(engine, each) for each in ids))
    (observed,) = drift.of(one)
    expected = [block.figures["value_drift"] for block in blocks if block.hunk == 0]
    assert [value for _, value in observed.blocks] == pytest.approx(expected, rel=1e-4)
    assert observed.suffix == alignment.recoverable_tokens
    assert DriftLog(engine, 32, tmp_path / "drift.jsonl").of(one) == [observed]
    with pytest.raises(InputError, match="block_size"):
        DriftLog(engine, 64, tmp_path / "drift.jsonl")
    monkeypatch.setattr(drift_log, "__version__", "0.0.0")
    with pytest.raises(InputError, match="differs in release"):
        DriftLog(engine, 32, tmp_path / "drift.jsonl")


def test_too_few_tasks_and_pairs_without_a_suffix_are_told(engine, tmp_path: Path):
    with pytest.raises(InputError, match="2 usable pairs of 2 tasks are too few"):
        calibrate(engine, [pairs(2)], tmp_path, config=CONFIG)
    with pytest.raises(InputError, match="1 tasks are too few for each half.* at least 4 in all"):
        check_tasks(pairs(1).pairs, least=2)
    eight = [pair(str(n), old=f"Fog {n}.", new=f"Sun {n}.") for n in range(8)]
    for each in split(eight)[1][:3]:  # too long for the model: one task is left to validate with
        eight[int(each.id)] = pair(each.id, old=f"Fog {each.id}. " * 400, new=each.id)
    with pytest.raises(InputError, match="1 usable pairs of 1 tasks are too few for each half"):
        calibrate(engine, [pair_set("eight", eight)], tmp_path, config=CONFIG)
    with pytest.raises(InputError, match="no edit of the calibration pairs has 128 tokens"):
        check_stretches(engine, [short_pair("x")])
    same = pair("x").old
    with pytest.raises(InputError, match="no pair that can be used .*old and new are the same"):
        unchanged = [ContextPair(str(n), str(n), "k", "d", same, same) for n in range(5)]
        calibrate(engine, [pair_set("same", unchanged)], tmp_path, config=CONFIG)


def test_a_model_whose_rows_are_no_numbers_is_an_error(smollm2_tokenizer, tmp_path: Path):
    engine = tiny_engine(smollm2_tokenizer, 2048)
    with torch.no_grad():
        engine.adapter.model.model.layers[0].self_attn.v_proj.weight.fill_(np.nan)
    with pytest.raises(PatchKVError, match="not numbers"):
        calibrate(engine, [pairs()], tmp_path, config=CONFIG)
    logged = (tmp_path / "drift.jsonl").read_text().splitlines()
    assert len(logged) == 1 and json.loads(logged[0])["block_size"] == 32  # the head alone
