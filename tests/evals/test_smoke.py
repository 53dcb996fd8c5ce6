"""Every method on two rows of each data set, on the embedded model. No data beside the tests'."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from patchkv_agents.engine import Engine
from patchkv_agents.recovery.named import method, method_names
from patchkv_evals.episodes import EpisodeKind
from patchkv_evals.running import Run, RunSpec, pool, run
from tests.evals.samples import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

EDITS: dict[str, EpisodeKind] = {
    "hotpotqa": "refresh",
    "2wikimqa": "summarize",
    "triviaqa": "flip",
    "musique": "flip_noted",
}


@pytest.fixture(scope="module")
def runs(
    smollm2_model: PreTrainedModel,
    smollm2_tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Run]:
    engine = Engine(smollm2_model, smollm2_tokenizer)
    policies = [method(name) for name in method_names()]
    found = []
    for dataset, edit in EDITS.items():
        rows = [replace(row, dataset=dataset) for row in ROWS]
        spec = RunSpec(dataset, "smollm2", edits=(edit,), limit=2, tokens=760, max_new_tokens=16)
        folder = tmp_path_factory.mktemp(dataset)
        first = run(engine, rows, policies, spec, folder).run
        again = run(engine, rows, policies, spec, folder).run  # nothing is left to do
        assert again.records == first.records
        found.append(first)
    return found


def figures(runs: list[Run], name: str, metric: str) -> list[float]:
    return [
        record["metrics"][metric]
        for run in runs
        for record in run.records
        if record["method"] == name and record["metrics"][metric] is not None
    ]


def test_results_are_complete(runs: list[Run]) -> None:
    for found in runs:
        assert found.failures == ()
        assert {
            name: metrics["f1"]["n"] for name, metrics in found.summary["methods"].items()
        } == dict.fromkeys(("full_prefill", *method_names()), 2)


def test_exact_methods_give_the_results_of_a_full_prefill(runs: list[Run]) -> None:
    assert max(figures(runs, "prefix_cache", "first_token_kl")) < 1e-5
    assert all(figures(runs, "prefix_cache", "exact_continuation"))
    assert set(figures(runs, "prefix_cache", "recompute_ratio")) == {1.0}
    for margin in figures(runs, "prefix_cache", "answer_margin_recovery"):
        assert margin == pytest.approx(1, abs=1e-3)


def test_approximate_methods_come_near(runs: list[Run]) -> None:
    for name in method_names():
        assert max(figures(runs, name, "first_token_kl")) < 2, name
    mean = {
        name: sum(found) / len(found)
        for name in ("patchkv", "direct_reuse")
        if (found := figures(runs, name, "first_token_kl"))
    }
    assert mean["patchkv"] < 0.1
    assert mean["patchkv"] < mean["direct_reuse"]


def test_rows_and_bytes_are_as_the_methods_say(runs: list[Run]) -> None:
    ratios = {name: figures(runs, name, "recompute_ratio") for name in method_names()}
    assert ratios["cacheblend"] == ratios["cacheblend_released"]
    assert ratios["patchkv_contiguous"] == pytest.approx(ratios["patchkv"], abs=0.07)
    for part in ("window", "tail"):
        pairs = zip(ratios[f"patchkv_no_{part}"], ratios["patchkv"], strict=True)
        assert all(fewer <= all_parts for fewer, all_parts in pairs), part
    int4, mixed, int8, fp16 = (
        sum(figures(runs, name, "payload_ratio"))
        for name in ("patchkv_int4", "patchkv", "patchkv_int8", "patchkv_fp16")
    )
    assert int4 < mixed < int8 < fp16


def test_pooled(runs: list[Run]) -> None:
    (pooled,) = pool(runs)
    assert (pooled.episodes, pooled.methods["patchkv"].n) == (8, 8)
    assert pooled.methods["patchkv"].speedups["prefix_cache"].estimate > 1
    assert len(pooled.targets()) == 5
