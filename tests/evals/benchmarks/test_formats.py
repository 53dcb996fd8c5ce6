"""The benchmark of formats, in small, and its quantisers against the stored ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError
from patchkv_evals.benchmarks.format_candidates import KEYS, VALUES
from patchkv_evals.benchmarks.formats import FormatsConfig, formats
from patchkv_kernels import PayloadFormat, Rope, RopeLayout, dequantize_scatter, quantize_gather
from tests.engine.models import tiny_engine

SENTENCES = (
    "The harbour of {place} freezes from December to March, and ferries stop for the winter. ",
    "Its lighthouse was built in {year} from granite that was shipped in from the south. ",
    "Three families of fishers still live there, and one of them keeps the keys. ",
)


@pytest.fixture
def data(tmp_path):
    """Two rows in the normalised form of the data sets."""
    paragraphs = [
        {
            "title": place,
            "text": "".join(SENTENCES).format(place=place, year=1800 + 7 * index),
            "is_supporting": index == 2,
        }
        for index, place in enumerate(["Norrvik", "Saltholm", "Grimsund", "Harnes", "Ulvoe"])
    ]
    file = tmp_path / "rows.jsonl"
    rows = [
        {
            "id": str(index),
            "question": f"When was the lighthouse of {place} built?",
            "answers": ["1814"],
            "paragraphs": paragraphs,
        }
        for index, place in enumerate(["Grimsund", "Harnes"])
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_the_benchmark_orders_formats_by_bytes_and_by_kl(data, smollm2_model, smollm2_tokenizer):
    engine = Engine(smollm2_model, smollm2_tokenizer)
    config = FormatsConfig(str(data), "hotpotqa", limit=2, candidates=1)
    steps: list[str] = []
    result = formats(engine, config, steps.append)

    mixes = {point["name"]: point for point in result.points if point["kind"] == "mix"}
    order = ["all f16", "all k8v8", "all k8v4", "all k4v4"]
    ratios = [mixes[name]["payload_ratio"] for name in order]
    kls = [mixes[name]["kl_mean"] for name in order]
    assert ratios == sorted(ratios, reverse=True) and kls == sorted(kls)
    assert kls[0] < 1e-5
    default = mixes["default"]
    assert ratios[2] < default["payload_ratio"] < ratios[0]
    assert default["kl_mean"] < kls[2]
    assert sum(default["shares"].values()) == pytest.approx(1.0)
    assert default["contexts"] == len(default["kl"]) == 2
    assert default["kl_mean"] == pytest.approx(np.mean(default["kl"]))
    candidates = [point for point in result.points if point["kind"] == "candidate"]
    assert [point["name"] for point in candidates] == [c.name for c in KEYS + VALUES]
    assert {point["of"] for point in candidates} == {"keys", "values"}
    assert "left" in steps[-1]


def test_data_without_usable_rows_and_lone_options_are_refused(tmp_path, smollm2_tokenizer):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"id": "no question, no passages"}\n')
    with pytest.raises(InputError, match="has no row of hotpotqa"):
        formats(tiny_engine(smollm2_tokenizer, 256), FormatsConfig(str(file), "hotpotqa"))
    with pytest.raises(InputError, match="--data and --dataset"):
        FormatsConfig(data="rows.jsonl")


def test_candidates_marked_as_used_are_what_is_stored():
    """Else the table would show other errors than those that payloads have."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 70, 64, generator=generator)
    # No rotation: keys as stored are keys before rotation.
    rope = Rope(np.zeros(32, dtype=np.float32), RopeLayout.HALF_SPLIT)
    used = {candidate.name: candidate for candidate in KEYS + VALUES if "(used)" in candidate.name}
    assert len(used) == 4
    for format, in_keys, in_values in (
        (PayloadFormat.K8V8, "8 bits, row, centred", "8 bits, row, symmetric"),
        (PayloadFormat.K4V4, "4 bits, groups of 32, centred", "4 bits, groups of 32, signed"),
    ):
        payload = quantize_gather(keys, values, [(0, 70, 0)], format=format, rope=rope)
        restored, rows = [torch.zeros_like(keys), torch.zeros_like(values)], np.arange(70)
        dequantize_scatter(payload, rows, rows, rows, *restored, rope=rope)
        pairs = ((KEYS, in_keys, keys, restored[0]), (VALUES, in_values, values, restored[1]))
        for table, prefix, exact, stored in pairs:
            (candidate,) = [c for c in table if c.name.startswith(prefix) and "(used)" in c.name]
            torch.testing.assert_close(candidate.apply(exact), stored)
            assert candidate.bits(64) == pytest.approx(bits_of(payload, table is KEYS))


def bits_of(payload, of_keys):
    """Bits of an element with its scale."""
    codes = payload.keys if of_keys else payload.values
    scales = payload.key_scales if of_keys else payload.value_scales
    elements = payload.keys.shape[0] * 3 * payload.rows * payload.head_dim
    return 8 * (codes.nbytes + scales.nbytes) / elements
