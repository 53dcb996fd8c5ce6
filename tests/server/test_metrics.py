"""What Prometheus is told."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from patchkv_agents.context import ThreadKey
from patchkv_agents.engine.shadow import Shadow, ShadowChecks
from patchkv_server.metrics import ServerMetrics

from ..engine.models import tiny_engine
from .scripted import FixedGauges, Scripted, conversation


def samples(metrics):
    """Each sample's value, by its name and the values of its labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_answers_are_counted(smollm2_tokenizer):
    served = Scripted(tiny_engine(smollm2_tokenizer, max_tokens=2048))
    served.ask(conversation(), thread="a-secret-thread")
    served.ask(conversation(train="is late"), thread="a-secret-thread")
    served.settle()
    served.activity.close()
    found = samples(served.metrics.total)
    total = served.activity.state(served.gauges, None, None)["totals"]["tokens"]
    for kind, tokens in total.items():
        assert found["patchkv_prompt_tokens_total", kind] == tokens
    assert total["restored"] > 0
    assert found["patchkv_resume_ttft_seconds_count", "patchkv"] == 2
    assert 0 < found["patchkv_resume_ttft_seconds_sum", "patchkv"] < 60
    assert found["patchkv_output_tokens_total",] == 4
    assert found["patchkv_edits_total", "replace_tool_result"] == 1
    assert found["patchkv_misses_total", "result_replaced"] == 1
    assert found["patchkv_fallbacks_total",] == 0
    assert found["patchkv_memory_bytes", "live"] == 3e6
    assert found["patchkv_threads", "live"] == 1 and found["patchkv_threads", "stored"] == 0
    assert "secret" not in served.metrics.total.text().decode()


def test_requests_are_counted():
    metrics = ServerMetrics()
    for status in (200, 200, 429):
        metrics.request(status)
    metrics.waited(0.3)
    metrics.cancelled()
    metrics.evicted(3)
    found = samples(metrics)
    assert found["patchkv_requests_total", "200"] == 2
    assert found["patchkv_requests_total", "429"] == 1
    assert found["patchkv_queue_wait_seconds_bucket", "0.25"] == 0
    assert found["patchkv_queue_wait_seconds_bucket", "0.5"] == 1
    assert found["patchkv_cancellations_total",] == 1
    assert found["patchkv_evictions_total",] == 3


def test_gauges_are_read_at_each_scrape():
    metrics, gauges = ServerMetrics(), FixedGauges(store_bytes=5)
    metrics.watch(gauges)
    assert samples(metrics)["patchkv_memory_bytes", "store"] == 5
    gauges.waiting, gauges.store_bytes = 7, None
    found = samples(metrics)
    assert found["patchkv_queue_requests", "waiting"] == 7
    assert ("patchkv_memory_bytes", "store") not in found  # there is no store


def test_names_of_policies_do_not_grow_without_bound():
    """A client may be allowed to name policies: what Prometheus keeps must not grow with them."""
    metrics = ServerMetrics()
    for number in range(100):
        report = SimpleNamespace(
            policy=f"mine-{number}",
            ttft_ms=2.0,
            resume_ttft_ms=1.0,
            payload_bytes=0,
            fallback_reason=None,
        )
        answer = SimpleNamespace(report=report, plan=_Plan, reply=None, edits=())
        metrics.answered(answer)
    found = samples(metrics)
    policies = {key[1] for key in found if key[0] == "patchkv_resume_ttft_seconds_count"}
    assert len(policies) <= 33
    assert found["patchkv_resume_ttft_seconds_count", "other"] == pytest.approx(68)


class _Plan:
    labels: list[int] = []


def test_shadow_checks_are_shown():
    shadow = Shadow(ShadowChecks(1.0), lambda ids, give_way: torch.tensor([0.0, 1.0]))
    metrics = ServerMetrics()
    assert "shadow" not in metrics.text().decode()
    metrics.watch_shadow(shadow)
    assert ("patchkv_shadow_first_token_kl_nats", "1") not in samples(metrics)
    for logits in ([0.0, 1.0], [0.0, 1.0], [1.0, 0.0]):
        shadow.offer(
            ThreadKey("a-secret-thread", ""), "patchkv", np.arange(9), torch.tensor(logits)
        )
        shadow.flush()
    found = samples(metrics)
    outcomes = {
        name[1]: value for name, value in found.items() if name[0] == "patchkv_shadow_checks_total"
    }
    assert outcomes == {"agreed": 2, "differed": 1, "dropped": 0, "failed": 0}
    assert found["patchkv_shadow_first_token_kl_nats", "0.5"] == 0.0
    assert found["patchkv_shadow_first_token_kl_nats", "1"] > 0.1
    assert "secret" not in metrics.text().decode()
