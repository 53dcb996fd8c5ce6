"""What Prometheus is told. No label has values that a client chooses. Needs `prometheus_client`."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from patchkv_agents.engine.outcomes import AnsweredCall
from patchkv_agents.engine.shadow import Shadow
from patchkv_server.gauges import Gauges, Place
from patchkv_server.misses import Miss
from patchkv_server.strips import counts

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_MAX_POLICIES = 32


class ServerMetrics:
    """The metrics of one server, in a registry of their own.

    | name | labels | what |
    | --- | --- | --- |
    | patchkv_requests_total | status | HTTP requests of the API |
    | patchkv_cancellations_total | | answers ended because the client went away |
    | patchkv_evictions_total | | threads dropped from memory to stay within its budget |
    | patchkv_queue_requests | state | waiting and running requests |
    | patchkv_queue_wait_seconds | | histogram: time in the queue |
    | patchkv_ttft_seconds | policy | histogram: from the request's arrival to the first id |
    | patchkv_resume_ttft_seconds | policy | histogram: the part of it that recovery took |
    | patchkv_failures_total | | calls of the engine that ended before the first id |
    | patchkv_prompt_tokens_total | kind | exact, new, recomputed, restored |
    | patchkv_output_tokens_total | | sampled tokens of complete answers |
    | patchkv_restored_bytes_total | | payload read to restore rows |
    | patchkv_edits_total | kind | edits found or declared |
    | patchkv_misses_total | cause | requests whose prefix ended before its end, by cause |
    | patchkv_fallbacks_total | | exact recoveries in place of the policy's |
    | patchkv_memory_bytes | tier | KV state: live, suspended, store |
    | patchkv_threads | place | threads by where their state is |
    | patchkv_shadow_checks_total | outcome | agreed, differed, dropped, failed |
    | patchkv_shadow_first_token_kl_nats | quantile | 0.5, 0.95, 1 of the last thousand checks |

    The last two are there with shadow checks only; `agreed` is the first token of a full prefill.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._policies: set[str] = set()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"patchkv_{name}", what, labels, registry=registry)

        def histogram(name: str, what: str, *labels: str) -> Histogram:
            return Histogram(f"patchkv_{name}", what, labels, registry=registry, buckets=_SECONDS)

        self._requests = counter("requests", "HTTP requests of the API.", "status")
        self._cancellations = counter("cancellations", "Answers whose client went away.")
        self._evictions = counter("evictions", "Threads dropped from memory for its budget.")
        self._waited = histogram("queue_wait_seconds", "Time in the queue.")
        self._ttft = histogram("ttft_seconds", "From a request to its first output id.", "policy")
        self._resume_ttft = histogram(
            "resume_ttft_seconds", "The recovery's part of the time to the first id.", "policy"
        )
        self._failures = counter("failures", "Calls that ended before their first output id.")
        self._prompt = counter("prompt_tokens", "Prompt tokens by what was done.", "kind")
        self._output = counter("output_tokens", "Sampled tokens of complete answers.")
        self._restored = counter("restored_bytes", "Payload read to restore rows.")
        self._edits = counter("edits", "Edits found or declared.", "kind")
        self._misses = counter("misses", "Requests whose prefix ended early, by cause.", "cause")
        self._fallbacks = counter("fallbacks", "Exact recoveries in place of the policy's.")

    def request(self, status: int) -> None:
        """An HTTP request of the API was answered with this status."""
        self._requests.labels(str(status)).inc()

    def waited(self, seconds: float) -> None:
        """A request left the queue after this time."""
        self._waited.observe(seconds)

    def cancelled(self) -> None:
        """An answer ended because its client went away."""
        self._cancellations.inc()

    def evicted(self, threads: int = 1) -> None:
        """Threads were dropped from memory to stay within its budget."""
        self._evictions.inc(threads)

    def answered(self, answered: AnsweredCall) -> None:
        """The engine gave an answer."""
        report = answered.report
        policy = self._policy(report.policy)
        self._ttft.labels(policy).observe(report.ttft_ms / 1e3)
        self._resume_ttft.labels(policy).observe(report.resume_ttft_ms / 1e3)
        for kind, tokens in counts(answered.plan).items():
            self._prompt.labels(kind).inc(tokens)
        if answered.reply is not None:
            self._output.inc(len(answered.reply.token_ids))
        self._restored.inc(report.payload_bytes)
        for edit in answered.edits:
            self._edits.labels(str(edit.kind)).inc()
        if report.fallback_reason is not None:
            self._fallbacks.inc()

    def failed(self) -> None:
        """A call of the engine ended before its first token."""
        self._failures.inc()

    def missed(self, miss: Miss) -> None:
        """It was found why a request's prefix ended early."""
        self._misses.labels(miss.cause).inc()

    def watch(self, gauges: Gauges, tenant: str | None = None) -> None:
        """Read queue, memory and threads of one tenant, or of all, at each scrape. Call it once."""
        self._registry.register(_GaugeCollector(gauges, tenant))

    def watch_shadow(self, shadow: Shadow) -> None:
        """Read what shadow checks have found at each scrape. To be called once."""
        self._registry.register(_ShadowCollector(shadow))

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self._registry)

    def _policy(self, name: str) -> str:
        """The policy's name as a label: of a custom one too many, `other`."""
        if name not in self._policies and len(self._policies) >= _MAX_POLICIES:
            return "other"
        self._policies.add(name)
        return name


class TenantMetrics:
    """The metrics of all tenants together, and those of each tenant that has a key.

    Args:
        tenants: names of those that have keys.

    Attributes:
        total: of all together.
    """

    def __init__(self, tenants: Iterable[str] = ()) -> None:
        self.total = ServerMetrics()
        self._own = {tenant: ServerMetrics() for tenant in tenants}

    def visible_to(self, tenant: str | None) -> ServerMetrics:
        """What a tenant may see; None sees all."""
        return self.total if tenant is None else self._own[tenant]

    def of(self, tenant: str | None) -> tuple[ServerMetrics, ...]:
        """The metrics to which an event of a tenant counts."""
        own = None if tenant is None else self._own.get(tenant)
        return (self.total,) if own is None else (self.total, own)

    def watch(self, gauges: Gauges) -> None:
        """Read queue, memory and threads from `gauges` at each scrape. To be called once."""
        for tenant, metrics in ((None, self.total), *self._own.items()):
            metrics.watch(gauges, tenant)


class _GaugeCollector(Collector):
    """Asks the gauges once for each scrape."""

    def __init__(self, gauges: Gauges, tenant: str | None) -> None:
        self._gauges = gauges
        self._tenant = tenant

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        gauges, tenant = self._gauges, self._tenant
        queue, memory = gauges.queue(tenant), gauges.memory(tenant)
        where = Counts(gauges.places(tenant).values())
        yield _family(
            "queue_requests",
            "Requests in the queue and at the model.",
            "state",
            {"waiting": queue.waiting, "running": queue.running},
        )
        tiers = {"live": memory.live_bytes, "suspended": memory.suspended_bytes}
        if memory.store_bytes is not None:
            tiers["store"] = memory.store_bytes
        yield _family("memory_bytes", "KV state by tier.", "tier", tiers)
        yield _family(
            "threads",
            "Threads by where their state is.",
            "place",
            {place: where[place] for place in get_args(Place)},
        )


class _ShadowCollector(Collector):
    """Asks for the summary once for each scrape."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        found = self._shadow.summary()
        checks = CounterMetricFamily(
            "patchkv_shadow_checks", "Answers of the sample by outcome.", labels=("outcome",)
        )
        for outcome, number in (
            ("agreed", found.agreed),
            ("differed", found.checks - found.agreed),
            ("dropped", found.dropped),
            ("failed", found.failed),
        ):
            checks.add_metric((outcome,), number)
        yield checks
        kls = {
            "0.5": found.first_token_kl_median,
            "0.95": found.first_token_kl_p95,
            "1": found.first_token_kl_max,
        }
        known = {quantile: kl for quantile, kl in kls.items() if kl is not None}
        what = "KL of approximate first tokens from exact ones, of the last thousand checks."
        yield _family("shadow_first_token_kl_nats", what, "quantile", known)


def _family(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"patchkv_{name}", what, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family
