"""Runs on a tiny random model: what they write, and how they go on after whatever stopped them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from patchkv_agents.context import render
from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError, PatchKVError
from patchkv_agents.profiling.states import SharedStates
from patchkv_agents.progress import Progress
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_agents.recovery.named import method
from patchkv_evals.episodes import (
    EpisodeKind,
    EpisodeSpec,
    PassagePool,
    RenderedCounter,
    build_episode,
)
from patchkv_evals.errors import DataError
from patchkv_evals.running import Outcome, Run, RunSpec, read_run, run
from patchkv_evals.running.methods import MethodRuns
from tests.engine.models import tiny_engine
from tests.evals.samples import ROWS

SPEC = RunSpec(
    "hotpotqa", "tiny", edits=("refresh", "flip"), limit=1, tokens=700, max_new_tokens=16
)
CHAIN_TOKENS = 1000
CHAIN = replace(SPEC, edits=("chain",), tokens=CHAIN_TOKENS)
METHODS = ("prefix_cache", "patchkv")


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer: PreTrainedTokenizerBase) -> Engine:
    return tiny_engine(smollm2_tokenizer, 4096)


@pytest.fixture(scope="module")
def finished(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two edits of one row. Its folder is not to be changed."""
    return start(engine, tmp_path_factory.mktemp("finished")).run


def start(
    engine: Engine,
    folder: Path,
    *,
    methods: tuple[str, ...] = METHODS,
    spec: RunSpec = SPEC,
    **options: Any,
) -> Outcome:
    return run(engine, ROWS, [method(name) for name in methods], spec, folder, **options)


def copied(run: Run, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "results.jsonl"):
        (folder / name).write_bytes((run.folder / name).read_bytes())
    return folder


def places(run: Run) -> list[tuple[str, int, str]]:
    return [(record["edit"], record["step"], record["method"]) for record in run.records]


def test_every_method_has_a_line_for_every_edit(finished: Run) -> None:
    names = ("full_prefill", *METHODS)
    assert places(finished) == [(edit, 0, name) for edit in SPEC.edits for name in names]
    assert finished.failures == ()
    for record in finished.records:
        assert record["row"] == ROWS[0].id
        assert record["answers"]
        assert abs(record["tokens_new"] - 700) <= 14
        assert record["rounds_ms"] == [record["metrics"]["resume_ttft_ms"]]
        assert record["report"]["tokens"] == record["tokens_new"]


def test_prefix_cache_is_a_full_prefill_in_less_time(finished: Run) -> None:
    for record in finished.records:
        metrics = record["metrics"]
        assert (metrics["stale_answer"] is None) == (record["stale_answers"] == [])
        if record["method"] == "patchkv":
            assert 0 < metrics["recompute_ratio"] < 1
            assert 0.3 < metrics["payload_ratio"] < 1.1
            assert metrics["store_ms"] > 0
        else:
            assert metrics["first_token_kl"] < 1e-6
            assert metrics["same_answer"] and metrics["exact_continuation"]
            assert metrics["recompute_ratio"] == 1
            assert metrics["answer_margin_recovery"] in (None, pytest.approx(1, abs=1e-3))


@pytest.fixture(scope="module")
def chained(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Any]]:
    """A flip and a chain of one row, and the contexts that were prefilled. Not to be changed."""
    cold = []
    resume = SharedStates.resume

    def counted(self: SharedStates, origin: Any, context: Any, *args: Any, **options: Any) -> Any:
        if origin is None:
            cold.append(context)
        return resume(self, origin, context, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedStates, "resume", counted)
        spec = replace(CHAIN, edits=("flip", "chain"))
        outcome = start(engine, tmp_path_factory.mktemp("chained"), spec=spec)
    return outcome.run, cold


def test_each_context_is_prefilled_once(engine: Engine, chained: tuple[Run, list[Any]]) -> None:
    """It serves all methods, and all edits that begin or end with it, as those of a chain do."""
    _, cold = chained
    edits: tuple[EpisodeKind, ...] = ("flip", "chain")
    pool, counter = PassagePool(ROWS), RenderedCounter(engine.tokenizer)
    contexts = {
        render(version.context, engine.tokenizer).token_ids.tobytes()
        for edit in edits
        for version in build_episode(
            ROWS[0], EpisodeSpec(edit, tokens=CHAIN_TOKENS), pool=pool, counter=counter
        ).versions
    }
    assert len(cold) == len(contexts) == 2 + 6


def test_a_run_that_is_interrupted_goes_on(engine: Engine, tmp_path: Path) -> None:
    """What was finished is kept, summarised, and not done again."""

    def interrupt(state: Progress) -> None:
        if state.done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(engine, tmp_path, progress=interrupt)
    first = read_run(tmp_path)
    assert {edit for edit, _, _ in places(first)} == {"refresh"}
    assert json.loads((tmp_path / "summary.json").read_text())["edits"].keys() == {"refresh"}

    whole = start(engine, tmp_path).run
    assert whole.records[: len(first.records)] == first.records
    assert places(whole)[len(first.records) :] == [
        ("flip", 0, name) for name in ("full_prefill", *METHODS)
    ]


def test_a_line_that_was_being_written_is_dropped(
    engine: Engine, finished: Run, tmp_path: Path
) -> None:
    """A machine that stops in the middle of a write leaves half a line."""
    path = copied(finished, tmp_path) / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read_run(tmp_path).records) == len(finished.records) - 1
    before = path.read_bytes()
    again = start(engine, tmp_path).run
    assert places(again) == places(finished)
    assert again.records[:-1] == finished.records[:-1]
    assert path.read_bytes().startswith(before[: before.rindex(b"\n") + 1])


def test_damage_in_the_middle_is_told(finished: Run, tmp_path: Path) -> None:
    path = copied(finished, tmp_path) / "results.jsonl"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(f"{first[:40]}\n{rest}")
    with pytest.raises(DataError, match=r"results.jsonl, line 1 is damaged"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokens": 800}, "tokens 700, and this one has 800"),
        ({"seed": 1}, "seed 0, and this one has 1"),
        ({"data_sha256": "other"}, "data_sha256 None"),
        ({"profile_sha256": "other"}, "profile_sha256 None"),
        ({"rounds": 2}, "rounds 1"),
    ],
)
def test_another_run_in_the_same_folder(
    engine: Engine, finished: Run, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    folder = copied(finished, tmp_path)
    with pytest.raises(DataError, match=told):
        start(engine, folder, spec=replace(SPEC, **change))
    assert read_run(folder).records == finished.records


def test_two_runs_do_not_write_to_one_folder(engine: Engine, finished: Run, tmp_path: Path) -> None:
    """Both would append the same episodes, and the summary would count them twice."""
    folder = copied(finished, tmp_path)
    told: list[str] = []

    def start_another(state: Progress) -> None:
        with pytest.raises(DataError, match="another run is writing to") as error:
            start(engine, folder)
        told.append(str(error.value))

    again = start(engine, folder, progress=start_another).run
    assert told and again.records == finished.records
    assert start(engine, folder).run.records == finished.records


def test_methods_edits_and_the_limit_may_grow(
    engine: Engine, finished: Run, tmp_path: Path
) -> None:
    folder = copied(finished, tmp_path)
    spec = replace(SPEC, edits=("refresh",), limit=2, data="moved.jsonl")
    grown = start(engine, folder, methods=("direct_reuse",), spec=spec).run
    assert grown.config["methods"] == ["full_prefill", *METHODS, "direct_reuse"]
    assert grown.config["edits"] == ["refresh", "flip"]
    assert grown.config["limit"] == 2
    assert grown.config["created"] == finished.config["created"]
    assert grown.records[: len(finished.records)] == finished.records
    added = [(r["row"], r["method"]) for r in grown.records[len(finished.records) :]]
    assert added == [
        ("row-0", "direct_reuse"),
        ("row-1", "full_prefill"),
        ("row-1", "direct_reuse"),
    ]


def test_rounds_are_medians(engine: Engine, tmp_path: Path) -> None:
    outcome = start(engine, tmp_path, spec=replace(SPEC, edits=("flip",), rounds=3))
    for record in outcome.run.records:
        assert len(record["rounds_ms"]) == 3
        assert record["metrics"]["resume_ttft_ms"] == sorted(record["rounds_ms"])[1]


def test_failures_are_written_and_tried_again(
    engine: Engine, tmp_path: Path, monkeypatch: Any
) -> None:
    """One method fails; the others, and the rows behind it, go on."""
    generate = SharedStates.resume

    def failing(self: SharedStates, origin: Any, context: Any, policy: Any, **kwargs: Any) -> Any:
        if policy.name == "patchkv":
            raise PatchKVError("out of order")
        return generate(self, origin, context, policy, **kwargs)

    spec = replace(SPEC, limit=2)
    with monkeypatch.context() as patch:
        patch.setattr(SharedStates, "resume", failing)
        broken = start(engine, tmp_path, spec=spec).run
    assert {name for _, _, name in places(broken)} == {"full_prefill", "prefix_cache"}
    assert [(f["method"], f["edit"], f["reason"]) for f in broken.failures] == [
        ("patchkv", edit, "PatchKVError: out of order") for edit in ("refresh", "flip") * 2
    ]
    assert broken.summary["failures"] == list(broken.failures)

    mended = start(engine, tmp_path, spec=spec).run
    assert mended.failures == ()
    assert mended.summary["methods"]["patchkv"]["f1"]["n"] == 4


@pytest.mark.parametrize("fails", ["patchkv", "full_prefill"])
def test_what_fails_in_a_chain_is_missed_in_the_edits_behind(
    engine: Engine, tmp_path: Path, monkeypatch: Any, fails: str
) -> None:
    """Each result that is not there has a line; those behind the failing edit once had none."""
    attempt = MethodRuns._attempt

    def failing(self: MethodRuns, attempts: Any, step: Any, **kwargs: Any) -> None:
        attempt(self, attempts, step, **kwargs)
        if step.number == 3:
            attempts[fails].error = MemoryError("full")

    monkeypatch.setattr(MethodRuns, "_attempt", failing)
    found = start(engine, tmp_path, spec=CHAIN).run
    steps: dict[str, list[int]] = {name: [] for name in ("full_prefill", *METHODS)}
    for record in found.records:
        steps[record["method"]].append(record["step"])
    lost = {"full_prefill", *METHODS} if fails == "full_prefill" else {fails}
    for name, done in steps.items():
        assert done == ([1, 2] if name in lost else [1, 2, 3, 4, 5])
    assert [(f["step"], f["method"], f["reason"]) for f in found.failures] == [
        (step, None if fails == "full_prefill" else fails, "MemoryError: full")
        for step in (3, 4, 5)
    ]


def test_an_episode_without_a_reference_has_failed(
    engine: Engine, tmp_path: Path, monkeypatch: Any
) -> None:
    def failing(self: SharedStates, *args: Any, **kwargs: Any) -> Any:
        raise MemoryError("full")

    monkeypatch.setattr(SharedStates, "resume", failing)
    outcome = start(engine, tmp_path, spec=replace(SPEC, edits=("flip",)))
    assert outcome.run.records == ()
    (failure,) = outcome.run.failures
    assert (failure["method"], failure["reason"]) == (None, "MemoryError: full")
    assert outcome.run.summary["methods"] == {}


def test_rows_without_an_episode_are_listed_once(engine: Engine, tmp_path: Path) -> None:
    """Row 3 is answered yes, which cannot be flipped; both runs find that out."""
    for _ in range(2):
        outcome = run(
            engine, ROWS[3:4], [method("prefix_cache")], replace(SPEC, edits=("flip",)), tmp_path
        )
    (failure,) = outcome.run.failures
    assert (failure["row"], failure["edit"], failure["method"]) == ("row-3", "flip", None)
    assert len((tmp_path / "failures.jsonl").read_text().splitlines()) == 1


def test_a_spent_budget_stops_between_episodes(engine: Engine, tmp_path: Path) -> None:
    outcome = start(engine, tmp_path, budget_minutes=0.0)
    assert (outcome.episodes_left, outcome.run.records) == (2, ())
    assert start(engine, tmp_path).episodes_left == 0


def test_in_a_chain_each_method_goes_on_from_its_own_state(
    engine: Engine, chained: tuple[Run, list[Any]], tmp_path: Path
) -> None:
    """An approximate method's rows grow older from step to step; an exact one's stay exact."""
    finished, _ = chained
    steps = {name: [] for name in ("full_prefill", *METHODS)}
    for record in finished.records:
        if record["edit"] == "chain":
            steps[record["method"]].append(record)
    for name, records in steps.items():
        assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
        assert [r["metrics"]["store_ms"] is None for r in records[1:]] == [True] * 4, name
    assert all(r["metrics"]["first_token_kl"] < 1e-6 for r in steps["prefix_cache"])
    assert all(r["report"]["restored"] > 0 for r in steps["patchkv"])
    assert any(record["stale_answers"] for record in steps["patchkv"])
    assert finished.failures == ()
    again = start(engine, copied(finished, tmp_path), spec=CHAIN)
    assert again.run.records == finished.records


def test_names_must_be_told_apart(engine: Engine, tmp_path: Path) -> None:
    twice = [RecoveryPolicy.default(), RecoveryPolicy.default()]
    for policies in (twice, [replace(RecoveryPolicy.default(), name="full_prefill")]):
        with pytest.raises(InputError, match="name"):
            run(engine, ROWS[:1], policies, SPEC, tmp_path)


def test_specs_are_checked() -> None:
    for wrong in ({"edits": ()}, {"edits": ("flip", "flip")}, {"rounds": 0}, {"limit": 0}):
        with pytest.raises(DataError):
            replace(SPEC, **wrong)
