"""`patchkv plan-cost`, whole: what it prints is what the cost model says."""

from __future__ import annotations

import json
import re

import pytest

from patchkv_agents.cli.main import main
from patchkv_agents.recovery.cost_presets import DEVICES, MODELS
from patchkv_agents.recovery.costs import EditedContext, MethodCost, estimate


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["plan-cost", *arguments])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_json_holds_the_estimates(capsys):
    code, out, _ = run(
        capsys, "--model", "glm-4-9b", "--device", "h200", "--tokens", "5000", "--json"
    )
    case = json.loads(out)["cases"][0]
    assert code == 0
    assert (case["prefix"], case["new"], case["suffix"]) == (1000, 256, 3744)
    context = EditedContext(5000, 1000, 256)
    expected = estimate(
        MODELS["glm-4-9b"], DEVICES["h200"], context, MethodCost("direct_reuse", 257, 4743, 1.0)
    )
    found = case["methods"]["direct_reuse"]
    assert found["resume_ttft_ms"] == pytest.approx(expected.resume_ttft_ms)
    times = [case["methods"][name]["resume_ttft_ms"] for name in ("prefix_cache", "patchkv")]
    assert case["methods"]["patchkv"]["speedup_over_prefix_cache"] == times[0] / times[1] > 1


def test_published_figures_stand_beside_their_setting_only(capsys):
    _, out, _ = run(capsys, "--tokens", "10000")
    assert re.search(r"median 3\.40.*gives 10\.\d and 2\.\d at the paper's ratios", out)
    for other in (("--device", "h200"), ("--transfer-gb-s", "1"), ("--tokens", "128000")):
        arguments = other if other[0] == "--tokens" else ("--tokens", "10000", *other)
        assert "median 3.40" not in run(capsys, *arguments)[1]


def test_a_slow_store_does_not_pay(capsys):
    _, out, _ = run(capsys, "--model", "glm-4-9b", "--transfer-gb-s", "0.01", "--tokens", "10000")
    assert "PatchKV is not twice as fast here" in out
    assert "Rows are worth fetching where they arrive at 0.13 GB/s or more" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--device", "abacus"), "choose a800, h200"),
        (("--edit-at", "1.5"), "a share of the context"),
        (("--tokens", "100"), "do not fit"),
        (("--transfer-gb-s", "0"), "greater than 0"),
        (("--device", "this"), "name one that fits this machine"),
        (("--model", "no/such-folder/x"), "there is no folder"),
    ],
)
def test_wrong_usage(capsys, arguments, says):
    code, out, error = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert says in error


@pytest.mark.slow
def test_rates_of_this_machine(capsys):
    """Measured with the embedded model: prefix cache costs what its rows cost at that rate."""
    code, out, _ = run(
        capsys, "--model", "smollm2", "--device", "this", "--tokens", "2000", "--json"
    )
    document = json.loads(out)
    assert code == 0
    assert 1e9 < document["device"]["flops_per_s"] < 1e15
    assert 1e6 < document["device"]["transfer_bytes_per_s"] < 1e12
    assert document["model"]["bytes_per_value"] == 4
    assert document["cases"][0]["methods"]["patchkv"]["speedup_over_prefix_cache"] > 1
