"""/metrics tells every number of the dashboard, and the same one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from prometheus_client.parser import text_string_to_metric_families

from omlx.actors.stats_messages import (
    CacheReport,
    EngineReport,
    ModelServed,
    RequestEnded,
    RequestRejected,
)
from omlx.core.usage import CacheGauges, EngineGauges, GdnGauges, ModelFacts
from omlx.web.metrics import METRICS, OUTCOMES
from tests.sim.records import record, running_row
from tests.web.stage import Served, dashboard

SHOWN_OTHERWISE = {
    "time": "the scrape has its own",
    "running": "rows of the request list, counted by requests_running",
    "latest": "the newest buckets of the charts, which Prometheus makes itself",
    "health": "a label",
    "memory.hot_bytes": "hot_bytes, as in the cache",
    "rejected_files": "a label",
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(served: Served, accept: str = "") -> tuple[str, Samples]:
    async with TestClient(served.server) as client:
        answer = await client.get("/metrics", headers={"Accept": accept})
        text = await answer.text()
        assert answer.status == 200
    return answer.content_type, samples(text)


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def fill(served: Served) -> None:
    await served.stats.tell(ModelServed(ModelFacts("demo", 4, 0, 12, 256, "00ff")))
    gauges = CacheGauges(
        *range(100, 122), rejected_files=(("checksum", 3), ('a"b\n', 1)), tier_state="ok"
    )
    await served.stats.tell(CacheReport(gauges, GdnGauges("embedded", "bf16", *range(200, 206))))
    await served.stats.tell(
        EngineReport(EngineGauges(3, 5, 0.25, 1234.5, 67.5), (running_row(id="r"),))
    )
    await served.stats.tell(RequestEnded(record(id="a", cached_tokens=0)))
    await served.stats.tell(RequestEnded(record(id="b", cached_tokens=96)))
    await served.stats.tell(RequestEnded(record(id="c", finish_reason="cancelled")))
    await served.stats.tell(RequestRejected())


@pytest.fixture
async def found(tmp_path: Path) -> Samples:
    async with dashboard(tmp_path) as served:
        await fill(served)
        return (await scrape(served))[1]


async def test_the_totals_are_those_of_the_dashboard(found: Samples) -> None:
    assert found["omlx_processed_tokens_total", ()] == 300
    assert found["omlx_cached_tokens_total", ()] == 144
    assert found["omlx_alltime_cached_tokens_total", ()] == 144
    assert found["omlx_efficiency_ratio", ()] == 0.48
    assert found["omlx_window_processed_tokens", (("window", "1h"),)] == 300
    outcomes = [found["omlx_requests_total", (("outcome", name),)] for name in OUTCOMES]
    assert outcomes == [2, 0, 1, 1]
    assert found["omlx_requests_running", ()] == 3
    assert found["omlx_rejected_files_total", (("reason", 'a"b\n'),)] == 1
    assert found["omlx_ssd_tier", (("state", "ok"),)] == 1
    assert found["omlx_time_to_first_token_seconds_count", ()] == 3
    assert found["omlx_time_to_first_token_seconds_bucket", (("le", "0.05"),)] == 3
    assert found["omlx_time_to_first_token_seconds_bucket", (("le", "0.025"),)] == 0


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of the statistics, with the path to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            here = f"{path}.{key}".removeprefix(".")
            if not {key, here} & SHOWN_OTHERWISE.keys():
                yield from leaves(inner, here)
    elif isinstance(value, int | float):
        yield path, value


async def test_no_number_of_the_dashboard_is_missing(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as served:
        await fill(served)
        async with TestClient(served.server) as client:
            stats = await (await client.get("/admin/api/stats")).json()
            told = samples(await (await client.get("/metrics")).text())
    values = set(told.values())
    with_path = {metric.path for metric in METRICS}

    for path, value in leaves(stats):
        scope, _, name = path.partition(".")
        if scope in ("session", "alltime", "1h", "24h"):
            shown = value / 1000 if name == "saved_ms" else value
            assert shown in values, path
        elif not path.startswith("model.layers"):
            assert path in with_path, path


async def test_vllms_names_come_when_they_are_asked_for(tmp_path: Path, found: Samples) -> None:
    assert not [name for name, _ in found if name.startswith("vllm:")]

    async with dashboard(tmp_path, metrics_vllm_names=True) as served:
        await fill(served)
        told = (await scrape(served))[1]

    label = (("model_name", "demo"),)
    assert told["vllm:prefix_cache_queries_total", label] == 300
    assert told["vllm:prefix_cache_hits_total", label] == 144
    assert told["vllm:prompt_tokens_total", label] == told["omlx_processed_tokens_total", ()]
    assert told["vllm:num_requests_waiting", label] == 5
    assert 0 <= told["vllm:kv_cache_usage_perc", label] <= 1
    assert told["vllm:e2e_request_latency_seconds_count", label] == 3


async def test_a_server_that_has_served_nothing_has_zeros(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as served:
        kind, told = await scrape(served)

    assert kind == "text/plain"
    assert told["omlx_processed_tokens_total", ()] == 0
    assert told["omlx_efficiency_ratio", ()] == 0
    assert told["omlx_health", (("level", "wait"),)] == 1


async def test_open_metrics_are_given_to_who_wants_them(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as served, TestClient(served.server) as client:
        wanted = "application/openmetrics-text; version=1.0.0"
        answer = await client.get("/metrics", headers={"Accept": wanted})
        text = await answer.text()

    assert answer.content_type == "application/openmetrics-text"
    assert text.endswith("# EOF\n")


async def test_two_servers_of_one_process_share_nothing(tmp_path: Path) -> None:
    async with dashboard(tmp_path / "a") as first, dashboard(tmp_path / "b") as second:
        await fill(first)

        counts = [
            (await scrape(one))[1]["omlx_processed_tokens_total", ()] for one in (first, second)
        ]

    assert counts == [300, 0]


def test_every_metric_has_its_own_name_and_a_help_text(tmp_path: Path) -> None:
    names = [metric.name for metric in METRICS]

    assert len(set(names)) == len(names)
    assert all(metric.help.endswith(".") for metric in METRICS)
