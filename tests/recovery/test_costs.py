"""The cost model against arithmetic done by hand, and its break-even points against a scan."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from patchkv_agents.errors import InputError
from patchkv_agents.recovery import RecoveryPolicy, RecoverySetup, Window, WindowModel
from patchkv_agents.recovery.cost_presets import DEVICES, MODELS
from patchkv_agents.recovery.costs import (
    DeviceCost,
    EditedContext,
    MethodCost,
    ModelCost,
    estimate,
    largest_edit,
    least_suffix,
    least_transfer_rate,
    restoring_pays,
    speedup,
)
from patchkv_agents.recovery.named import method

SMALL = ModelCost(
    "small",
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    hidden=32,
    vocabulary=100,
    linear_parameters=10_000,
    stored_parameters=10_000,
)
MACHINE = DeviceCost(
    "machine",
    flops_per_s=1e6,
    memory_bytes_per_s=1e6,
    transfer_bytes_per_s=1e5,
    overhead_s=0.5,
    overlap=False,
)
CONTEXT = EditedContext(tokens=1000, prefix=200, new=100)


def test_sizes_of_the_published_models():
    """Linear parameters, against the models' known totals without embeddings, in billions."""
    assert MODELS["qwen3-32b"].linear_parameters == pytest.approx(31.2e9, rel=0.01)
    assert MODELS["llama-3.3-70b"].linear_parameters == pytest.approx(68.5e9, rel=0.01)
    assert MODELS["glm-4-9b"].linear_parameters == pytest.approx(8.2e9, rel=0.01)
    assert MODELS["qwen3-32b"].kv_bytes == 262_144
    assert MODELS["glm-4-9b"].kv_bytes == 40_960


def test_sizes_from_a_configuration():
    from transformers import LlamaConfig, Qwen3MoeConfig

    llama = LlamaConfig(
        hidden_size=64,
        intermediate_size=100,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    sizes = ModelCost.of_config("tiny", llama, bytes_per_value=4)
    per_layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 100  # q, k and v, o; the MLP
    assert sizes.linear_parameters == 3 * per_layer
    assert sizes.kv_bytes == 2 * 3 * 2 * 16 * 4
    mixture = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=999,
        moe_intermediate_size=10,
        num_experts_per_tok=4,
        num_experts=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        vocab_size=50,
    )
    experts = 4 * 3 * 64 * 10
    sizes = ModelCost.of_config("moe", mixture)
    assert sizes.linear_parameters == 4 * 64 * 64 + experts
    assert sizes.stored_parameters == 4 * 64 * 64 + 8 * experts


def test_estimate_by_hand():
    found = estimate(SMALL, MACHINE, CONTEXT, MethodCost("by hand", 300.0, 700.0, 0.5))
    flops = 300 * (2 * 10_000 + 4 * 2 * 4 * 8 * 600) + 2 * 32 * 100  # 600 keys seen on average
    written = 700 * 2 * 2 * 2 * 8 * 2
    fetch_ms = (written * 0.5 / 1e5 + written / 1e6) * 1e3
    assert found.compute_ms == pytest.approx(flops / 1e6 * 1e3)
    assert found.fetch_ms == pytest.approx(fetch_ms)
    assert found.resume_ttft_ms == pytest.approx(500 + found.compute_ms + fetch_ms)
    overlapped = estimate(
        SMALL, replace(MACHINE, overlap=True), CONTEXT, MethodCost("by hand", 300.0, 700.0, 0.5)
    )
    assert overlapped.resume_ttft_ms == pytest.approx(500 + found.compute_ms + fetch_ms / 2)


def test_few_rows_are_bound_by_reading_the_weights():
    machine = replace(MACHINE, flops_per_s=1e15)
    one = machine.compute_s(SMALL, 1, 10)
    assert one == pytest.approx((10_000 + 3200) * 2 / 1e6)
    assert machine.compute_s(SMALL, 512, 10) == one
    assert machine.compute_s(SMALL, 513, 10) == pytest.approx((20_000 + 3200) * 2 / 1e6)
    mixture = replace(SMALL, stored_parameters=25_000)  # two rows may need other experts
    for rows, parameters in ((1, 10_000), (2, 20_000), (3, 25_000), (512, 25_000)):
        read = (parameters + 3200) * 2 / 1e6
        assert machine.compute_s(mixture, rows, 10) == pytest.approx(read)


@pytest.mark.parametrize("name", ["prefix_cache", "direct_reuse", "cacheblend", "patchkv"])
def test_rows_of_the_methods(name):
    rows = MethodCost.of_setup(method(name), CONTEXT, SMALL).rows
    if name == "prefix_cache":
        assert rows == 800
    elif name == "direct_reuse":
        assert rows == 101
    elif name == "cacheblend":  # one of two layers in full, then a share
        share, tail = method(name).policy.method.ratio, method(name).policy.method.tail_tokens
        assert rows == pytest.approx(100 + 0.5 * 700 + 0.5 * (share * 700 + tail), abs=1)
    else:  # of 700 tokens behind the edit, an eighth may be computed again
        assert rows == pytest.approx(100 + 700 / 8, abs=1)


def test_rows_of_a_predicted_window_and_under_a_limit():
    """The model says half the tokens of the edit, 50; the policy at least `window_tokens`."""
    half = WindowModel(math.log(51 / 101), (0.0, 1.0, 0.0, 0.0, 0.0, 0.0))
    policy = RecoveryPolicy("test", Window(0, tail_tokens=1, window_model=half))

    def rows(**changes):
        return MethodCost.of_setup(RecoverySetup(policy.varied(**changes)), CONTEXT, SMALL).rows

    assert rows() == 100 + 50 + 1
    assert rows(window_tokens=60) == 100 + 60 + 1
    assert rows(window_tokens=60, max_repaired=0.05) == 100 + 0.05 * 700
    assert rows(tail_tokens=40, max_repaired=0.05) == 100 + 40  # the tail is computed anyway


def test_rows_never_exceed_the_suffix():
    short = EditedContext(tokens=310, prefix=200, new=100)
    for name in ("cacheblend", "patchkv", "prefix_cache"):
        cost = MethodCost.of_setup(method(name), short, SMALL)
        assert cost.rows <= 110
        assert cost.restored >= 200


def test_least_suffix_agrees_with_a_scan():
    """With slow transfers, recovery pays only once what it need not compute is long enough."""
    model, device = MODELS["glm-4-9b"], DEVICES["a800"]
    setup = method("patchkv")
    context = EditedContext(tokens=10_000, prefix=2_000, new=256)
    for factor in (1.5, 2.0):
        least = least_suffix(model, device, context, setup, factor=factor)
        found = [
            suffix
            for suffix in range(1, 4000)
            if speedup(model, device, EditedContext(2_256 + suffix, 2_000, 256), setup) >= factor
        ]
        assert least == found[0]


def test_largest_edit_is_the_last_that_pays():
    model, device = MODELS["qwen3-32b"], DEVICES["a800"]
    context = EditedContext(tokens=10_000, prefix=2_000, new=256)
    setup = method("patchkv")
    largest = largest_edit(model, device, context, setup, factor=2.0)

    def faster(new):
        return speedup(model, device, EditedContext(9_744 + new, 2_000, new), setup)

    assert largest is not None
    assert faster(largest) >= 2.0 > faster(largest + 1)


def test_where_recovery_does_not_pay():
    crawling = replace(DEVICES["h200"], transfer_bytes_per_s=1e6)  # a store far away
    model = MODELS["glm-4-9b"]
    context = EditedContext(tokens=10_000, prefix=2_000, new=256)
    assert least_suffix(model, crawling, context, method("patchkv"), factor=2.0) is None
    assert largest_edit(model, crawling, context, method("patchkv"), factor=2.0) is None
    payload = int(8_000 * model.kv_bytes * 0.4)
    arguments = {"rows": 8_000, "payload_bytes": payload, "keys_seen": 6_000}
    assert not restoring_pays(model, crawling, **arguments)
    assert restoring_pays(model, DEVICES["h200"], **arguments)
    assert restoring_pays(model, crawling, rows=0, payload_bytes=0, keys_seen=0)


def test_fetching_at_the_least_rate_takes_as_long_as_computing():
    model, device = MODELS["qwen3-32b"], DEVICES["a800"]
    context = EditedContext(tokens=10_000, prefix=2_000, new=256)
    rate = least_transfer_rate(model, device, context, payload_ratio=0.4)
    assert rate is not None
    same = replace(device, transfer_bytes_per_s=rate)
    rows = context.suffix
    assert same.fetch_s(model, rows, 0.4) == pytest.approx(same.compute_s(model, rows, 6_000))
    slow_memory = replace(device, memory_bytes_per_s=1e6, flops_per_s=1e30)
    wide = replace(model, linear_parameters=1, stored_parameters=1, hidden=1, vocabulary=1)
    assert least_transfer_rate(wide, slow_memory, context, payload_ratio=0.4) is None


def test_wrong_numbers_are_refused():
    with pytest.raises(InputError, match="do not fit"):
        EditedContext(tokens=100, prefix=90, new=20)
    with pytest.raises(InputError, match="greater than 0"):
        replace(MACHINE, flops_per_s=0.0)
