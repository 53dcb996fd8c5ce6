"""Rates measured on a tiny model, held against what was timed."""

from __future__ import annotations

import pytest

from patchkv_agents.engine import rates
from patchkv_agents.engine.rates import measured_rates
from patchkv_agents.errors import InputError

from .models import tiny_engine


def test_rates_are_those_of_the_sequence(smollm2_tokenizer, monkeypatch):
    """With a clock of the test's own, a prefill of 10 ms gives the rate by hand."""
    engine = tiny_engine(smollm2_tokenizer, max_tokens=400)
    resume = rates.KVSequence.resume

    def timed(self, token_ids, policy, **options):
        from dataclasses import replace

        resumed = resume(self, token_ids, policy, **options)
        return replace(resumed, recovery_ms=10.0, restore_ms=5.0)

    monkeypatch.setattr(rates.KVSequence, "resume", timed)
    sizes, device = measured_rates(engine, "tiny")
    tokens = 400 - 2 * 3 - 2
    assert sizes.name == "tiny"
    assert sizes.bytes_per_value == 4
    assert device.flops_per_s == pytest.approx(sizes.flops(tokens, tokens / 2) / 0.010)
    stored = device.transfer_bytes_per_s * 0.005 / ((tokens + 1) * sizes.kv_bytes)
    assert 0.15 < stored < 0.35  # mixed precision against 32 bits; heads of 16 have more scales
    assert not device.overlap


def test_a_context_that_is_too_short(smollm2_tokenizer):
    engine = tiny_engine(smollm2_tokenizer, max_tokens=100)
    with pytest.raises(InputError, match="too short to measure"):
        measured_rates(engine, "tiny")
