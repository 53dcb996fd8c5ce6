"""Rows through the unchanged model: what a row sees, and what it writes."""

from __future__ import annotations

import pytest
import torch

from patchkv_agents.backends.transformers import adapter as adapter_module
from patchkv_agents.backends.transformers.adapter import ModelAdapter, RowCache
from patchkv_agents.ranges import RowSet
from tests.engine.models import BUILDERS, full_logits, random_ids, tiny_model

TOKENS = 423
SCATTERED = RowSet(((33, 97), (160, 161), (200, 263), (400, 423)))


@pytest.fixture(scope="module", params=sorted(BUILDERS))
def model(request):
    return tiny_model(request.param)


def prefilled(model, token_ids) -> tuple[ModelAdapter, RowCache]:
    adapter = ModelAdapter(model)
    cache = adapter.new_cache(len(token_ids) + 9)
    adapter.forward_rows(token_ids, RowSet.of_range(0, len(token_ids)), cache)
    return adapter, cache


@pytest.mark.parametrize("tokens", [1, 3, 33, 97, 423])
def test_prefill_in_chunks_equals_a_plain_call(model, tokens, monkeypatch):
    monkeypatch.setattr(adapter_module, "MAX_ROWS", 50)
    token_ids = random_ids(1, tokens)
    adapter = ModelAdapter(model)
    logits = adapter.forward_rows(token_ids, RowSet.of_range(0, tokens), adapter.new_cache(tokens))
    torch.testing.assert_close(logits, full_logits(model, token_ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("max_rows", [7, 512])
def test_scattered_rows_write_what_a_full_prefill_writes(model, max_rows, monkeypatch):
    """Rows run on a correct cache reproduce it, and touch no other row."""
    monkeypatch.setattr(adapter_module, "MAX_ROWS", max_rows)
    token_ids = random_ids(2, TOKENS)
    adapter, cache = prefilled(model, token_ids)
    keys, values = cache.shards[0].keys.clone(), cache.shards[0].values.clone()
    for start, stop in SCATTERED.ranges:
        cache.shards[0].keys[:, :, start:stop] = 1e3
        cache.shards[0].values[:, :, start:stop] = 1e3
    logits = adapter.forward_rows(token_ids, SCATTERED, cache)
    torch.testing.assert_close(
        cache.shards[0].keys[:, :, :TOKENS], keys[:, :, :TOKENS], atol=1e-4, rtol=0
    )
    torch.testing.assert_close(
        cache.shards[0].values[:, :, :TOKENS], values[:, :, :TOKENS], atol=1e-4, rtol=0
    )
    others = torch.ones(TOKENS, dtype=torch.bool)
    others[SCATTERED.positions()] = False
    assert torch.equal(
        cache.shards[0].keys[:, :, :TOKENS][:, :, others], keys[:, :, :TOKENS][:, :, others]
    )
    torch.testing.assert_close(logits, full_logits(model, token_ids), atol=1e-4, rtol=1e-4)


def test_logits_of_the_last_rows_are_those_of_a_call_each(model, monkeypatch):
    monkeypatch.setattr(adapter_module, "MAX_ROWS", 20)
    token_ids = random_ids(2, TOKENS)
    adapter, cache = prefilled(model, token_ids)
    cache.shards[0].keys[:, :, 200:230] = 1e3  # runs first, in chunks of its own
    rows = RowSet(((200, 230), (400, 403), (420, TOKENS)))
    logits = adapter.last_logits(token_ids, rows, cache, count=5)
    for place, position in enumerate((401, 402, 420, 421, 422)):
        expected = full_logits(model, token_ids[: position + 1])
        torch.testing.assert_close(logits[place], expected, atol=1e-4, rtol=1e-4)
    for count in (0, 21, 37):
        with pytest.raises(ValueError, match="rows in one call"):
            adapter.last_logits(token_ids, rows, cache, count=count)


def test_no_row_sees_a_later_key(model):
    """Two public CacheBlend codes align the mask of scattered rows to the bottom right, so that
    rows see future keys. A NaN planted in a row that is not recomputed marks every row that reads
    it, even with weight zero: rows before it stay clean, rows behind it do not.
    """
    token_ids = random_ids(3, TOKENS)
    adapter, cache = prefilled(model, token_ids)
    marker = 180
    assert marker not in SCATTERED.positions()
    cache.shards[0].keys[:, :, marker] = float("nan")
    cache.shards[0].values[:, :, marker] = float("nan")
    adapter.forward_rows(token_ids, SCATTERED, cache)
    written = cache.shards[0].values[-1]
    for start, stop in SCATTERED.ranges:
        marked = written[:, start:stop].isnan().any(dim=(0, 2))
        assert bool(marked.all()) == (start > marker)
        assert bool(marked.any()) == (start > marker)


def test_rows_of_one_run_are_causal_among_themselves(model):
    """Changing the last token of a run changes no row before it."""
    token_ids = random_ids(4, TOKENS)
    adapter, cache = prefilled(model, token_ids)
    before = cache.shards[0].values.clone()
    changed = token_ids.copy()
    changed[262] = (changed[262] + 1) % 90 + 3
    adapter.forward_rows(changed, SCATTERED, cache)
    torch.testing.assert_close(
        cache.shards[0].values[:, :, 200:262], before[:, :, 200:262], atol=1e-4, rtol=0
    )
    assert not torch.allclose(cache.shards[0].values[:, :, 262], before[:, :, 262], atol=1e-3)


def test_outside_the_engine_the_model_works_as_before(model):
    """The registered attention function is plain SDPA when no rows are active."""
    prompt = torch.from_numpy(random_ids(5, 40))[None]
    ModelAdapter(model)
    ours = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    model.set_attn_implementation("sdpa")
    plain = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(ours, plain)


def test_a_cache_grows_without_losing_rows(model):
    token_ids = random_ids(6, 70)
    adapter, cache = prefilled(model, token_ids)
    keys = cache.shards[0].keys[:, :, :70].clone()
    cache.reserve(1000)
    assert cache.capacity == 1000
    assert torch.equal(cache.shards[0].keys[:, :, :70], keys)
