"""The benchmarks that need no model: fields, and figures that follow from the sizes."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from patchkv_agents.alignment import align
from patchkv_agents.errors import InputError
from patchkv_evals.benchmarks import plan, restore, store
from patchkv_evals.benchmarks.synthetic import (
    MIXES,
    RowShape,
    checkpoint_of,
    text_like_ids,
    with_hunks,
)

SMALL = RowShape(layers=3, kv_heads=2, head_dim=32)


def with_rounds(*names):
    return {f"{name}{suffix}" for name in names for suffix in ("_ms", "_rounds_ms")}


def test_edits_lie_behind_the_first_fifth_and_keep_the_rest():
    ids = text_like_ids(2000)
    new = with_hunks(ids, 4)
    alignment = align(ids, new)
    assert len(alignment.hunks) == 4
    assert alignment.prefix == pytest.approx(400, abs=2)
    assert alignment.aligned_tokens == pytest.approx(2000 - 4 * 56, abs=12)


def test_restore_reads_fewer_bytes_in_smaller_formats_and_rates_are_bytes_by_time():
    config = restore.RestoreConfig((256, 320), shape=SMALL, rounds=2)
    result = restore.restore(config)
    assert [(p["tokens"], p["format"]) for p in result.points] == [
        (tokens, name) for tokens in (256, 320) for name in MIXES
    ]
    own = {p["format"]: p for p in result.points if p["tokens"] == 256}
    assert set(own["f16"]) == {
        "format", "tokens", "payload_bytes", "payload_ratio", "payload_gb_per_s", "rows_gb_per_s",
        "relative",
    } | with_rounds("restore")  # fmt: skip
    # Keys and values of 3 layers and 2 heads of 32 channels, 2 bytes each; and small tables.
    assert own["f16"]["payload_bytes"] == pytest.approx(2 * 3 * 2 * 32 * 2 * 256, rel=0.01)
    assert own["f16"]["payload_ratio"] == pytest.approx(1.0, abs=0.01)
    assert own["native"]["payload_ratio"] == pytest.approx(2.0, abs=0.01)
    order = ["native", "f16", "k8v8", "k8v4", "k4v4"]
    ratios = [own[name]["payload_ratio"] for name in order]
    assert ratios == sorted(ratios, reverse=True)
    assert own["f16"]["relative"] == 1.0
    k8v8 = own["k8v8"]
    assert k8v8["relative"] == pytest.approx(k8v8["restore_ms"] / own["f16"]["restore_ms"])
    written = 2 * 3 * 2 * 32 * 4 * 256
    assert k8v8["rows_gb_per_s"] == pytest.approx(written / k8v8["restore_ms"] / 1e6)


def test_a_format_that_does_not_exist_is_said():
    with pytest.raises(InputError, match="no format 'int3': use some of native, f16"):
        restore.RestoreConfig(formats=("int3",))


def test_saving_and_loading_are_timed_for_each_store_and_format(tmp_path):
    config = store.StoreConfig(96, folder=str(tmp_path), shape=SMALL, rounds=2)
    points = store.measure({"folder": str(tmp_path / "kv")}, config)
    assert [(p["store"], p["mix"]) for p in points] == [("folder", mix) for mix in store.STORED]
    for point in points:
        assert set(point) == {
            "store", "mix", "tokens", "payload_bytes", "save_gb_per_s", "load_gb_per_s",
        } | with_rounds("save", "first_layer", "load")  # fmt: skip
        assert point["first_layer_ms"] <= point["load_ms"]
        assert point["payload_bytes"] == checkpoint_of(MIXES[point["mix"]], 96, SMALL).payload_bytes


def test_without_a_redis_server_only_folders_are_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    config = store.StoreConfig(64, folder=str(tmp_path), shape=SMALL, rounds=1)
    assert {point["store"] for point in store.store(config).points} == {"folder"}


def test_planning_is_timed_by_its_parts():
    result = plan.plan(plan.PlanConfig((500,), 3, SMALL, rounds=2))
    (point,) = result.points
    assert set(point) == {"tokens"} | with_rounds(*plan.PARTS)
    assert all(point[f"{name}_ms"] > 0 for name in plan.PARTS)
    assert json.loads(json.dumps(result.document()))["config"]["shape"]["layers"] == 3


def test_rows_have_the_shape_and_dtype_of_the_model():
    shape = RowShape(2, 3, 16, "bfloat16")
    rows = shape.random_rows(5)
    assert rows.shape == (2, 3, 5, 16) and rows.dtype == torch.bfloat16
    assert shape.bytes_16 == 2 * 2 * 3 * 16 * 2
