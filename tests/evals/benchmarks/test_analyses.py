"""`bench sensitivity` and `bench selection` on tiny random weights."""

from __future__ import annotations

import json

import pytest

from patchkv_agents.divergence import first_token_kl
from patchkv_agents.engine import Engine
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.errors import InputError
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_evals.benchmarks import contexts, selection, sensitivity
from patchkv_evals.benchmarks.selection_summary import points_text, ratio_text, summed_up
from tests.engine.models import tiny_engine

TOKENS = 700


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer) -> Engine:
    return tiny_engine(smollm2_tokenizer, 4096)


@pytest.fixture(scope="module")
def selected(engine):
    config = selection.SelectionConfig(tokens=TOKENS, budget=0.1, draws=2)
    return selection.selection(engine, config)


def by_rule(points):
    return {(point["rule"], point["draw"]): point for point in points}


def test_every_rule_adds_as_many_blocks_to_the_same_base(selected):
    points = by_rule(selected.points)
    others = [(rule, 0) for rule in selection.RULES] + [("random", 1)]
    assert set(points) == {("none", 0), ("base", 0), *others}
    base = points["base", 0]
    assert base["blocks"] == base["rows"] == 0 and base["budget"] >= 2
    for key in others:
        point = points[key]
        assert point["blocks"] == base["budget"]
        assert 0 < point["rows"] <= 32 * base["budget"]
        added = point["repair_ratio"] - base["repair_ratio"]
        assert added == pytest.approx(
            points["near_edit", 0]["repair_ratio"] - base["repair_ratio"], abs=0.1
        )
    assert points["none", 0]["repair_ratio"] < base["repair_ratio"]
    assert points["random", 0]["kl"] != points["random", 1]["kl"]
    assert json.loads(json.dumps(selected.document()))["points"] == list(selected.points)


def test_recomputing_everything_behind_the_edit_is_a_full_prefill(engine):
    """So the moved rows, the forced answer and the masks belong together."""
    config = selection.SelectionConfig(tokens=TOKENS, budget=1.0, draws=1)
    points = by_rule(selection.selection(engine, config).points)
    assert points["none", 0]["kl"] > 1e-4
    for rule in selection.RULES:
        assert points[rule, 0]["repair_ratio"] == 1.0
        assert points[rule, 0]["kl"] < 1e-8
        assert points[rule, 0]["exact_continuation"]


def test_rules_do_what_the_engine_does_with_the_same_policies(engine, selected):
    """The base is a policy without attention; the default's rule is `attention`."""
    context = contexts.demo_context(engine.tokenizer, TOKENS)
    points = by_rule(selected.points)

    def logits_of(token_ids, policy, sequence=None):
        sequence = sequence or KVSequence(engine.adapter, engine.rope)
        return sequence, sequence.resume(token_ids, policy).logits

    _, exact = logits_of(context.new, RecoveryPolicy.exact())
    for rule, fraction in (("base", 0.0), ("attention", 0.1)):
        policy = RecoveryPolicy(rule, 32, fraction, 64)
        old, _ = logits_of(context.old, RecoveryPolicy.exact())
        _, logits = logits_of(context.new, policy, old)
        kl = first_token_kl(exact, logits)
        assert points[rule, 0]["first_kl"] == pytest.approx(kl, rel=1e-3)


def test_gains_are_against_the_base_and_draws_count_once():
    def point(context, rule, kl, exact, draw=0):
        return {
            "context": context, "row": context, "rule": rule, "draw": draw, "kl": kl,
            "exact_continuation": exact, "repair_ratio": 0.1,
        }  # fmt: skip

    points = []
    for context in "abcd":
        points += [
            point(context, "base", 1e-2, context == "a"),
            point(context, "attention", 1e-3, context != "d"),
            point(context, "random", 1e-2, True, 0),
            point(context, "random", 1e-4, False, 1),
        ]
    lines = {line["rule"]: line for line in summed_up(points)}
    assert lines["base"]["kl_gain"].estimate == lines["base"]["exact_gain"].estimate == 0
    assert lines["attention"]["kl_gain"].estimate == pytest.approx(1.0)
    assert lines["attention"]["exact_gain"].estimate == pytest.approx(0.5)
    assert lines["attention"]["exact"] == 0.75
    assert lines["random"]["n"] == 4
    assert lines["random"]["kl_median"] == pytest.approx(5.05e-3)
    assert ratio_text(lines["attention"]["kl_gain"]) == "10.00 [10.00, 10.00]"
    assert points_text(lines["attention"]["exact_gain"]).startswith("+50.0 [")


def test_sensitivity_has_a_point_for_each_block_and_context(engine):
    steps: list[str] = []
    config = sensitivity.SensitivityConfig(tokens=TOKENS, format="k4v4")
    result = sensitivity.sensitivity(engine, config, steps.append)
    (context,) = sensitivity.contexts_of(result.points)
    blocks = [point for point in result.points if point["kind"] == "block"]
    assert len(blocks) == context["blocks"] and len(steps) == 1
    assert sum(point["tokens"] for point in blocks) == context["tokens"] - 1
    assert context["total_kl"] == pytest.approx(sum(point["kl"] for point in blocks))
    assert 0.1 < context["top_kl"] <= 1
    largest = sorted((point["kl"] for point in blocks), reverse=True)[: round(len(blocks) / 10)]
    assert context["top_kl"] == pytest.approx(sum(largest) / context["total_kl"])
    assert all(context[f"top_{key}"] <= context["top_kl"] for key in sensitivity.PREDICTORS)
    last = [point["kl"] for point in blocks if not point["scored"]]
    assert len(last) in (1, 2) and context["top_risk"] * context["total_kl"] >= sum(last)
    places = [point["place"] for point in blocks]
    assert places == sorted(places) and 0 < places[0] < places[-1] < 1
    (note,) = sensitivity.notes(result)
    assert f"{context['top_kl']:.0%}" in note
    json.dumps(result.document(), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "f16"}, "no format 'f16': use one of k8v8, k8v4, k4v4"),
        ({"data": "rows.jsonl"}, "--data and --dataset"),
    ],
)
def test_what_sensitivity_refuses(change, message):
    with pytest.raises(InputError, match=message):
        sensitivity.SensitivityConfig(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 0.0}, "the budget is 0.0"),
        ({"draws": 0}, "draws is 0"),
        ({"dataset": "hotpotqa"}, "--data and --dataset"),
    ],
)
def test_what_selection_refuses(change, message):
    with pytest.raises(InputError, match=message):
        selection.SelectionConfig(**change)
