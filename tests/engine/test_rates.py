"""Rates measured on a tiny model, held against what was timed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from patchkv_agents.engine import rates
from patchkv_agents.engine.rates import measured_rates
from patchkv_agents.errors import InputError

from .models import tiny_engine


def test_rates_are_those_of_the_sequence(smollm2_tokenizer, monkeypatch):
    """With a clock of the test's own, on which everything takes 10 ms, against rates by hand."""
    engine = tiny_engine(smollm2_tokenizer, max_tokens=400)
    clock = SimpleNamespace(perf_counter=partial(next, itertools.count(0, 0.010)))
    monkeypatch.setattr(rates, "time", clock)
    sizes, device = measured_rates(engine, "tiny")
    tokens = 400 - 1
    assert sizes.name == "tiny"
    assert sizes.bytes_per_value == 4
    assert device.flops_per_s == pytest.approx(sizes.flops(tokens, tokens / 2) / 0.010)
    weight_bytes = 4 * (sizes.linear_parameters + sizes.hidden * sizes.vocabulary)
    assert device.memory_bytes_per_s == pytest.approx(weight_bytes / 0.010)
    stored = device.transfer_bytes_per_s * 0.010 / ((tokens + 1) * sizes.kv_bytes)
    assert 0.15 < stored < 0.35  # mixed precision against 32 bits; heads of 16 have more scales
    assert not device.overlap


def test_what_a_gpu_has_still_to_do_counts(smollm2_tokenizer, monkeypatch):
    """On a GPU, a call of the model returns before its logits are there.

    The time of a prefill once ended there, and the rest of it was taken for a decode step's.
    """
    engine = tiny_engine(smollm2_tokenizer, max_tokens=400)
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    resume, append = rates.KVSequence.resume, rates.KVSequence.append
    restore = rates.Restoration

    class Pending:
        """Logits that take a while, once they are asked for."""

        def __init__(self, seconds):
            self.seconds = seconds

        def __getitem__(self, index):
            clock.now += self.seconds
            return 0.0

    def restored(*arguments):
        clock.now += 0.005
        return restore(*arguments)

    monkeypatch.setattr(rates, "time", clock)
    monkeypatch.setattr(rates, "Restoration", restored)
    monkeypatch.setattr(
        rates.KVSequence, "resume", lambda *call: replace(resume(*call), logits=Pending(0.040))
    )
    monkeypatch.setattr(
        rates.KVSequence, "append", lambda *call: (append(*call), Pending(0.002))[1]
    )
    sizes, device = measured_rates(engine, "tiny")
    tokens = 400 - 1
    weight_bytes = 4 * (sizes.linear_parameters + sizes.hidden * sizes.vocabulary)
    assert device.flops_per_s == pytest.approx(sizes.flops(tokens, tokens / 2) / 0.040)
    assert device.memory_bytes_per_s == pytest.approx(weight_bytes / 0.002)


def test_a_context_that_is_too_short(smollm2_tokenizer):
    engine = tiny_engine(smollm2_tokenizer, max_tokens=100)
    with pytest.raises(InputError, match="too short to measure"):
        measured_rates(engine, "tiny")
