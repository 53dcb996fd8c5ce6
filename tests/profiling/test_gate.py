"""The gate: what passes, what does not and why, and that nobody is judged by what he learnt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.context import Conversation, parse_messages
from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError, ProfileError
from patchkv_agents.profiling.gate import Thresholds, calibration_marks, unseen, validate
from patchkv_agents.profiling.pairs import ContextPair, pair_set
from patchkv_agents.profiling.trials import Trial, Trials, setup_key
from patchkv_agents.recovery import RecoveryPolicy, RecoverySetup, Window
from tests.engine.models import tiny_engine

from .profiles import profile_of

DIRECT_REUSE = RecoveryPolicy.named("direct_reuse")

NOTHING = replace(DIRECT_REUSE, name="patchkv")
"""Repairs nothing: what a policy that is too short would do."""
NEARLY_ALL = RecoveryPolicy("patchkv", Window(240, tail_tokens=64, block_size=32))
FEW = Thresholds(pairs=4, tasks=2)


def conversation(weather: str, place: str = "") -> Conversation:
    text = "Say why that is, and what else you know of the town. "
    return Conversation(
        parse_messages(
            [
                {"role": "user", "content": f"It {weather} today{place}. What follows?"},
                {"role": "user", "content": text * 27},
            ]
        )
    )


def pairs_of(*weathers: str, kind: str = "refresh", dataset: str = "weather"):
    return pair_set(
        f"{dataset}.jsonl",
        [
            ContextPair(
                weather, weather[:2], kind, dataset, conversation("rains", f" in {weather[:2]}"),
                conversation(weather), (), ("snow",), ("town",),
            )
            for weather in weathers
        ],
    )  # fmt: skip


PAIRS = pairs_of("snows", "snowed", "hails", "hailed")


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer) -> Engine:
    return tiny_engine(smollm2_tokenizer, 1024)


@pytest.fixture(scope="module", autouse=True)
def ran_once():
    """Trials that a test has run serve the others, too."""
    found: dict[tuple[str, str], Trial] = {}
    run = Trials.run

    def cached(self, policies, *, storage, **others):
        key = setup_key(RecoverySetup(policies[0], storage))
        keys = [(pair.digest, key) for pair in self._pairs]
        if not found.keys() >= {*keys}:
            found.update(zip(keys, run(self, policies, storage=storage, **others), strict=True))
        return [found[key] for key in keys]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trials, "run", cached)
        yield


def of(engine: Engine, policy: RecoveryPolicy):
    return profile_of(policy, fingerprint=engine.fingerprint, fit={"calibration_tasks": []})


def test_a_policy_near_the_full_prefill_passes_and_the_profile_with_it(engine, tmp_path):
    profile = of(engine, NEARLY_ALL)
    validation, skipped = validate(engine, profile, PAIRS, thresholds=FEW)
    assert validation.reasons == () and skipped == ()
    assert replace(profile, validation=validation).has_passed
    assert not replace(profile, policy=NOTHING, validation=validation).has_passed
    data = validation.data[0]
    assert (data.name, data.pairs, data.tasks) == ("weather.jsonl", 4, 2)
    assert data.sha256 == PAIRS.sha256 and validation.thresholds["first_token_kl_p95"] == 0.1
    (replace(profile, validation=validation)).save(tmp_path / "p.json")


def test_the_figures_are_those_of_the_trials(engine):
    validation, _ = validate(engine, of(engine, NOTHING), PAIRS)
    trials = Trials(engine, PAIRS.pairs, answer_tokens=24).run([NOTHING], storage=PrecisionPolicy())
    kls = [trial.first_token_kl for trial in trials]
    found = validation.measures
    assert found["first_token_kl_median"].value == pytest.approx(np.median(kls), rel=1e-3)
    assert found["first_token_kl_p95"].value == pytest.approx(np.quantile(kls, 0.95), rel=1e-3)
    for measure in found.values():
        assert measure.low <= measure.value <= measure.high and measure.n == 4
    assert {"exact_continuation", "same_answer", "stale_answer_rate", "repair_ratio"} <= {*found}


def test_a_policy_that_repairs_too_little_does_not_pass(engine):
    profile = of(engine, NOTHING)
    strict = replace(FEW, first_token_kl_median=1e-6, first_token_kl_p95=1e-5)
    validation, _ = validate(engine, profile, PAIRS, thresholds=strict)
    assert not validation.passed and not replace(profile, validation=validation).has_passed
    assert any("median first-token KL" in reason for reason in validation.reasons)
    assert any("95th percentile" in reason for reason in validation.reasons)


def test_too_few_pairs_do_not_pass_however_good_they_are(engine):
    validation, _ = validate(engine, of(engine, NEARLY_ALL), PAIRS)
    assert validation.reasons == (
        "4 pairs are too few: 12 are needed",
        "2 tasks are too few: 6 are needed",
    )


def test_other_names_of_one_task_do_not_make_several(engine):
    renamed = pair_set("renamed", [replace(p, task=f"task {p.id}") for p in PAIRS.pairs])
    validation, _ = validate(engine, of(engine, NEARLY_ALL), renamed, thresholds=FEW)
    assert renamed.tasks == validation.data[0].tasks == 2 and validation.passed
    fewer = pair_set("fewer", renamed.pairs[:2])
    validation, _ = validate(engine, of(engine, NEARLY_ALL), fewer, thresholds=FEW)
    assert "1 tasks are too few: 2 are needed" in validation.reasons


def test_stale_answers_and_first_tokens_count(engine, monkeypatch):
    """Scripted trials: KL is fine, but half of the answers are those from before the edit."""
    run = Trials.run

    def scripted(self, policies, **others):
        return [
            replace(t, stale=i < 2, full_prefill_stale=i < 1, top1_agree=i > 0)
            for i, t in enumerate(run(self, policies, **others))
        ]

    monkeypatch.setattr(Trials, "run", scripted)
    validation, _ = validate(engine, of(engine, NEARLY_ALL), PAIRS, thresholds=FEW)
    assert [reason.split(",")[0] for reason in validation.reasons] == [
        "75.0% of the likeliest first tokens are the full prefill's",
        "2 answers are out of date",
    ]
    assert validation.measures["stale_answer_rate"].value == 0.5
    assert validation.measures["full_prefill_stale_answer_rate"].value == 0.25


def test_kinds_of_edits_are_told_apart(engine):
    both = pair_set("both", [*PAIRS.pairs[:2], *pairs_of("is dry", kind="flip").pairs])
    found = validate(engine, of(engine, NOTHING), both)[0].measures
    assert found["first_token_kl_median/refresh"].n == 2
    assert found["first_token_kl_median/flip"].n == found["repair_ratio/flip"].n == 1


def test_pairs_that_are_recomputed_as_a_whole_say_nothing(engine):
    whole = NEARLY_ALL.varied(window_tokens=900)
    with pytest.raises(InputError, match="longer contexts"):
        validate(engine, of(engine, whole), PAIRS)
    with pytest.raises(InputError, match="exact"):
        validate(engine, of(engine, replace(RecoveryPolicy.exact(), name="patchkv")), PAIRS)


def test_another_models_profile_is_not_validated(engine):
    with pytest.raises(ProfileError, match="patchkv profile"):
        validate(engine, profile_of(NOTHING), PAIRS)


def test_nothing_is_judged_by_what_it_was_fitted_to():
    fitted = pairs_of("snows", "hails")
    profile = profile_of(fit={"calibration_tasks": calibration_marks(fitted.pairs)})
    with pytest.raises(InputError, match="fitted to all 2 pairs"):
        unseen(profile, fitted)
    elsewhere = ContextPair(
        "x", "fog", "refresh", "other", conversation("is foggy"), conversation("is dry")
    )
    known = replace(elsewhere, id="y", task="known", new=conversation("snows"))
    left = unseen(profile, pair_set("mixed", [*PAIRS.pairs, elsewhere, known]))
    assert [pair.id for pair in left.pairs] == ["x"]  # the others share contexts or tasks
    assert len(left.skipped) == 5 and "fitted" in left.skipped[0].reason
    with pytest.raises(ProfileError, match="profile again"):
        unseen(profile_of(fit={}), PAIRS)


def test_thresholds_are_checked():
    for wrong in ({"first_token_kl_median": -1.0}, {"top1_agree": 1.5}, {"pairs": 0}):
        with pytest.raises(InputError):
            Thresholds(**wrong)
    for number in ("nan", "inf"):
        with pytest.raises(InputError, match="use a number"):
            Thresholds(first_token_kl_p95=float(number))
