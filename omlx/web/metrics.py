"""``GET /metrics``: everything the pages show, for Prometheus.

A scrape asks the statistics once and builds its answer from that, in a registry of its own: no
number here can differ from the dashboard's. vLLM's names of the same things come on top when
``metrics_vllm_names`` is set, for dashboards that were made for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from omlx.actors.stats_messages import ReadMetrics
from omlx.web.admin import ask_stats
from omlx.web.edge import EDGE

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Counter(NamedTuple):
    """A number of the statistics that only grows. ``path`` leads to it."""

    path: str
    name: str
    help: str


class Gauge(NamedTuple):
    path: str
    name: str
    help: str


WINDOWS = ("1h", "24h")
OUTCOMES = ("completed", "failed", "cancelled", "rejected")
LEVELS = ("ok", "wait", "warn", "bad")
TIER_STATES = ("ok", "off", "full", "degraded")
KINDS = ("kv", "rotating", "recurrent")

TOTALS = {
    "processed_tokens": "Prompt tokens of requests whose prefill ended, each request once.",
    "cached_tokens": "Those of them that were not computed again.",
    "generated_tokens": "Tokens generated.",
    "unfinished_tokens": "Prompt tokens computed for requests that ended before their prefill did.",
    "attribution_stripped": "Prompts that a client's attribution was left out of.",
}

METRICS: tuple[Counter | Gauge, ...] = (
    Gauge("uptime_s", "uptime_seconds", "Time since the start."),
    Gauge("engine.running", "requests_running", "Requests that have a slot."),
    Gauge("engine.waiting", "requests_waiting", "Requests that wait for a slot."),
    Gauge("engine.last_step_age_s", "last_step_age_seconds", "Since the last step, while work is."),
    Gauge("engine.report_age_s", "engine_report_age_seconds", "Since the engine last reported."),
    Gauge("engine.prefill_tps", "prefill_tokens_per_second", "Speed of the last prefills."),
    Gauge("engine.decode_tps", "decode_tokens_per_second", "Speed of the last decoding steps."),
    Counter("cache.hits", "block_hits", "Block look-ups that found one."),
    Counter("cache.misses", "block_misses", "Block look-ups that found none."),
    Counter("cache.cow_copies", "cow_copies", "Blocks copied because others hold them."),
    Counter("cache.evictions", "evictions", "Blocks lost from RAM, and files removed, for room."),
    Counter("cache.evictions_ram", "evictions_ram", "Blocks that left RAM without a copy."),
    Counter("cache.evictions_ssd", "evictions_ssd", "Files removed for room."),
    Counter("cache.ssd_written_bytes", "ssd_written_bytes", "Written to the SSD tier."),
    Counter("cache.ssd_restored_bytes", "ssd_restored_bytes", "Read from the SSD tier."),
    Counter("cache.pending_stops", "pending_stops", "Chains not persisted for want of room."),
    Counter("cache.corrupt_blocks", "corrupt_blocks", "Files found damaged; misses."),
    Gauge("cache.shared_blocks", "shared_blocks", "Blocks held by more than one."),
    Gauge("cache.blocks_total", "blocks_total", "Blocks of the pool."),
    Gauge("cache.blocks_free", "blocks_free", "Blocks that hold nothing."),
    Gauge("cache.blocks_cached", "blocks_cached", "Blocks kept for reuse."),
    Gauge("cache.hot_bytes", "hot_bytes", "In the RAM tier."),
    Gauge("cache.hot_limit_bytes", "hot_limit_bytes", "What the RAM tier may take."),
    Gauge("cache.ssd_bytes", "ssd_bytes", "Under the SSD tier's folder, all models."),
    Gauge("cache.ssd_limit_bytes", "ssd_limit_bytes", "What the SSD tier may take."),
    Gauge("cache.ssd_files", "ssd_files", "Files of the SSD tier."),
    Gauge("cache.incompatible_bytes", "incompatible_bytes", "Of other models and formats."),
    Gauge("cache.incompatible_files", "incompatible_files", "Files of other models and formats."),
    Gauge("cache.pending_bytes", "pending_bytes", "Blocks that wait to be written."),
    Gauge("cache.pending_limit_bytes", "pending_limit_bytes", "How much of them may wait."),
    Gauge("gdn.checkpoints", "gdn_checkpoints", "Checkpoints of recurrent layers."),
    Counter("gdn.gdn_checkpoint_loads", "gdn_checkpoint_loads", "Checkpoints used."),
    Counter("gdn.gdn_checkpoint_walkbacks", "gdn_checkpoint_walkbacks", "An earlier one was used."),
    Counter("gdn.gdn_decode_failures", "gdn_decode_failures", "Checkpoints that were refused."),
    Gauge("gdn.pending_bytes", "gdn_pending_bytes", "Checkpoints that wait to be written."),
    Gauge("gdn.pending_limit_bytes", "gdn_pending_limit_bytes", "How much of them may wait."),
    Gauge("memory.total_bytes", "memory_budget_bytes", "What everything together may take."),
    Gauge("memory.weights_bytes", "memory_weights_bytes", "Of that, the model's weights."),
    Gauge("memory.reserve_bytes", "memory_reserve_bytes", "Of that, kept free."),
    Gauge("memory.live_kv_bytes", "memory_live_kv_bytes", "What running requests take now."),
    Gauge("memory.reserved_bytes", "memory_reserved_bytes", "What they will take at their end."),
    Gauge("memory.hot_allowed_bytes", "memory_hot_allowed_bytes", "For the RAM tier now."),
    Gauge("memory.active_bytes", "memory_active_bytes", "What MLX holds."),
    Gauge("memory.peak_bytes", "memory_peak_bytes", "The most that it held since the start."),
    Gauge("memory.waiting", "requests_waiting_for_memory", "Requests that wait for memory."),
    Counter("memory.preempted", "preempted_requests", "Rows that went back to the queue."),
    Gauge("model.block_size", "block_size_tokens", "Tokens of a KV block."),
)
"""What is one number in the statistics and has no label."""

HISTOGRAMS = {
    "seconds": {
        "ttft": ("time_to_first_token_seconds", "From the request to its first token."),
        "total": ("request_seconds", "From the request to its last token."),
        "queue": ("queue_seconds", "Until the prefix was looked up."),
        "lookup": ("lookup_seconds", "Until the cache granted what it knows."),
        "restore": ("restore_seconds", "Until that was in the engine."),
        "prefill": ("prefill_seconds", "From there to the first token."),
        "decode": ("decode_seconds", "From the first token to the last."),
    },
    "tokens": {
        "prompt": ("request_prompt_tokens", "Prompt tokens of a request."),
        "generated": ("request_generated_tokens", "Generated tokens of a request."),
    },
}

VLLM_COUNTERS = {
    "vllm:prompt_tokens": "session.processed_tokens",
    "vllm:generation_tokens": "session.generated_tokens",
    "vllm:prefix_cache_queries": "session.processed_tokens",
    "vllm:prefix_cache_hits": "session.cached_tokens",
}
VLLM_GAUGES = {
    "vllm:num_requests_running": "engine.running",
    "vllm:num_requests_waiting": "engine.waiting",
}
VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("seconds", "ttft"),
    "vllm:e2e_request_latency_seconds": ("seconds", "total"),
    "vllm:request_queue_time_seconds": ("seconds", "queue"),
    "vllm:request_prefill_time_seconds": ("seconds", "prefill"),
    "vllm:request_decode_time_seconds": ("seconds", "decode"),
    "vllm:request_prompt_tokens": ("tokens", "prompt"),
    "vllm:request_generation_tokens": ("tokens", "generated"),
}


def add_metrics(app: web.Application) -> None:
    app.router.add_get("/metrics", metrics)


async def metrics(request: web.Request) -> web.Response:
    found = orjson.loads(await ask_stats(request, ReadMetrics()))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scrape(found, vllm=request.app[EDGE].loaded.settings.metrics_vllm_names))
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    headers = {**HEADERS, "Content-Type": content_type}
    # Some milliseconds, which streams need not wait for.
    body = await asyncio.to_thread(encode, registry)
    return web.Response(body=body, headers=headers)


class Scrape(Collector):
    """One answer of the statistics, as metrics."""

    def __init__(self, found: dict[str, Any], *, vllm: bool = False) -> None:
        self._found = found
        self._vllm = vllm

    def collect(self) -> Iterable[Metric]:
        yield from self._totals()
        for metric in METRICS:
            value = self._at(metric.path)
            if value is None:
                continue  # the engine has not reported
            if isinstance(metric, Counter):
                yield CounterMetricFamily(f"omlx_{metric.name}", metric.help, value)
            else:
                yield GaugeMetricFamily(f"omlx_{metric.name}", metric.help, value)
        yield from self._states()
        for unit, those in HISTOGRAMS.items():
            for key, (name, text) in those.items():
                yield self._histogram(f"omlx_{name}", text, unit, key)
        if self._vllm:
            yield from self._aliases()

    def _totals(self) -> Iterator[Metric]:
        found = self._found
        for scope, prefix in (("session", "omlx"), ("alltime", "omlx_alltime")):
            totals = found[scope]
            for name, text in TOTALS.items():
                yield CounterMetricFamily(f"{prefix}_{name}", text, totals[name])
            # Those can fall, so they are no counters.
            yield GaugeMetricFamily(f"{prefix}_efficiency_ratio", _EFFICIENCY, totals["efficiency"])
            yield GaugeMetricFamily(f"{prefix}_saved_seconds", _SAVED, totals["saved_ms"] / 1000)
            ended = CounterMetricFamily(f"{prefix}_requests", _REQUESTS, labels=["outcome"])
            for outcome in OUTCOMES:
                ended.add_metric([outcome], totals["requests"][outcome])
            yield ended
        for name, text in TOTALS.items():
            yield self._by_window(name, text, lambda totals, name=name: totals[name])
        yield self._by_window("efficiency_ratio", _EFFICIENCY, lambda one: one["efficiency"])
        yield self._by_window("saved_seconds", _SAVED, lambda one: one["saved_ms"] / 1000)
        recent = GaugeMetricFamily("omlx_window_requests", _REQUESTS, labels=["window", "outcome"])
        for window in WINDOWS:
            for outcome in OUTCOMES:
                recent.add_metric([window, outcome], found[window]["requests"][outcome])
        yield recent

    def _by_window(self, name: str, text: str, value: Any) -> Metric:
        family = GaugeMetricFamily(f"omlx_window_{name}", text, labels=["window"])
        for window in WINDOWS:
            family.add_metric([window], value(self._found[window]))
        return family

    def _states(self) -> Iterator[Metric]:
        found = self._found
        model, gdn = found["model"], found["gdn"]
        level = found["health"]["level"]
        yield _one_of("omlx_health", "How the server is.", "level", LEVELS, level)
        state = found["cache"]["tier_state"]
        yield _one_of("omlx_ssd_tier", "How the SSD tier is.", "state", TIER_STATES, state)
        layers = GaugeMetricFamily("omlx_model_layers", "Layers, by kind.", labels=["kind"])
        for kind in KINDS:
            layers.add_metric([kind], model["layers"][kind])
        yield layers
        rejected = CounterMetricFamily(
            "omlx_rejected_files", "Files of the SSD tier that were refused.", labels=["reason"]
        )
        for reason, count in found["cache"]["rejected_files"].items():
            rejected.add_metric([reason], count)
        yield rejected
        facts = {"id": model["id"], "namespace": model["namespace"]}
        facts |= {"gdn_storage": gdn["storage"], "gdn_codec": gdn["codec"]}
        yield InfoMetricFamily("omlx_model", "What is served.", facts)

    def _histogram(self, name: str, text: str, unit: str, key: str, **labels: str) -> Metric:
        spread = self._found["distributions"][unit][key]
        family = HistogramMetricFamily(name, text, labels=list(labels))
        below, buckets = 0, []
        for bound, count in zip([*spread["bounds"], None], spread["counts"], strict=True):
            below += count
            buckets.append(("+Inf" if bound is None else f"{bound:g}", below))
        family.add_metric(list(labels.values()), buckets, spread["sum"])
        return family

    def _aliases(self) -> Iterator[Metric]:
        label = {"model_name": self._found["model"]["id"]}
        names, values = list(label), list(label.values())
        for name, path in VLLM_COUNTERS.items():
            counter = CounterMetricFamily(name, _ALIAS, labels=names)
            counter.add_metric(values, self._at(path))
            yield counter
        for name, path in VLLM_GAUGES.items():
            gauge = GaugeMetricFamily(name, _ALIAS, labels=names)
            gauge.add_metric(values, self._at(path))
            yield gauge
        cache = self._found["cache"]
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", _ALIAS, labels=names)
        limit = cache["hot_limit_bytes"]
        usage.add_metric(values, min(1.0, cache["hot_bytes"] / limit) if limit else 0.0)
        yield usage
        for name, (unit, key) in VLLM_HISTOGRAMS.items():
            yield self._histogram(name, _ALIAS, unit, key, **label)

    def _at(self, path: str) -> Any:
        value: Any = self._found
        for part in path.split("."):
            value = value[part]
        return value


def _one_of(name: str, text: str, label: str, names: tuple[str, ...], now: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for one in names:
        family.add_metric([one], one == now)
    return family


_EFFICIENCY = "Cached tokens by processed tokens; 0 when nothing was processed."
_SAVED = "What a cold prefill of the cached tokens would have taken, less look-up and restore."
_REQUESTS = "Requests that ended, and those that were refused at admission."
_ALIAS = "As vLLM names it."
