"""The dashboard's pages hold no script of others, and its numbers are those of the records."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient

import omlx.resources
from omlx.actors.stats_messages import EngineReport, ModelServed, RequestEnded
from omlx.core.usage import EngineGauges, ModelFacts
from omlx.resources import resource_dir
from omlx.settings import load_settings
from omlx.web import admin
from omlx.web.edge import Edge
from omlx.web.pages import NAV
from omlx.web.server import make_app
from tests.sim.records import record, running_row
from tests.web.stage import Served, dashboard


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with dashboard(tmp_path) as served:
        yield served


@pytest.fixture
async def client(served: Served) -> AsyncIterator[ClientSession]:
    async with TestClient(served.server) as client:
        yield client.session


def at(served: Served, path: str) -> str:
    return str(served.server.make_url(path))


async def until_readers(served: Served, count: int) -> None:
    for _ in range(250):
        if len(served.actor[-1]._feeds) == count:
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"there are {len(served.actor[-1]._feeds)} readers, not {count}")


# ── pages and files ──────────────────────────────────────────────────────────────────────────


async def test_the_page_runs_no_script_but_ours(served: Served, client: ClientSession) -> None:
    async with client.get(at(served, "/admin")) as answer:
        html = await answer.text()

    policy = answer.headers["Content-Security-Policy"]
    assert answer.status == 200
    assert answer.content_type == "text/html"
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", html)


async def test_every_file_of_the_page_is_there_and_comes_from_us(
    served: Served, client: ClientSession
) -> None:
    async with client.get(at(served, "/admin")) as answer:
        html = await answer.text()
    paths = re.findall(r'(?:src|href)="(/static/[^"]+)"', html)
    assert len(paths) >= 5
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', html)

    modules = resource_dir("static") / "js"
    imported = [f"/static/js/{module.name}" for module in sorted(modules.glob("*.js"))]
    for path in (*paths, *imported):
        async with client.get(at(served, path)) as answer:
            assert answer.status == 200, path
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Cache-Control"] == "no-cache"
            etag = answer.headers["ETag"]
        async with client.get(at(served, path), headers={"If-None-Match": etag}) as answer:
            assert answer.status == 304, path


def test_no_link_of_the_navigation_is_dead(tmp_path: Path) -> None:
    app = make_app(Edge(load_settings({}, {}, tmp_path), stats=None))  # pyright: ignore
    served = {route.resource.canonical for route in app.router.routes() if route.resource}

    assert {item.href for item in NAV} <= served


async def test_nothing_outside_the_static_folder_is_served(
    served: Served, client: ClientSession
) -> None:
    for path in ("/static/", "/static/%2e%2e/pyproject.toml", "/static/..%2fpyproject.toml"):
        async with client.get(at(served, path)) as answer:
            assert answer.status in (403, 404), path


def test_no_script_makes_markup_from_text() -> None:
    for module in (resource_dir("static") / "js").glob("*.js"):
        source = module.read_text("utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", source)


def test_what_is_vendored_has_its_licence() -> None:
    for folder in (resource_dir("static") / "vendor").iterdir():
        assert folder.name == "README.md" or (folder / "LICENSE").is_file()


def test_resources_are_found_installed_first_and_then_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "omlx"
    package.mkdir()
    monkeypatch.setattr(omlx.resources, "PACKAGE", package)
    with pytest.raises(FileNotFoundError, match=r"_static.*static"):
        resource_dir("static")

    (tmp_path / "static").mkdir()
    assert resource_dir("static") == tmp_path / "static"

    (package / "_static").mkdir()
    assert resource_dir("static") == package / "_static"


# ── numbers ──────────────────────────────────────────────────────────────────────────────────


async def test_stats_history_and_requests_agree(served: Served, client: ClientSession) -> None:
    await served.stats.tell(ModelServed(ModelFacts(id="demo", block_size=16)))
    await served.stats.tell(RequestEnded(record(id="a", cached_tokens=0)))
    await served.stats.tell(RequestEnded(record(id="b", cached_tokens=96)))

    async with client.get(at(served, "/admin/api/stats")) as answer:
        stats = await answer.json()
        assert answer.headers["Cache-Control"] == "no-store"
    async with client.get(at(served, "/admin/api/history?res=1m")) as answer:
        history = await answer.json()
    async with client.get(at(served, "/admin/api/requests?limit=10")) as answer:
        rows = (await answer.json())["requests"]
    async with client.get(at(served, "/admin/api/requests/b")) as answer:
        one = await answer.json()

    assert stats["session"]["efficiency"] == 0.48
    assert sum(row[1] + row[2] for row in history["rows"]) == 200
    assert sum(row["cached_tokens"] for row in rows) == 96
    assert [row["id"] for row in rows] == ["b", "a"]
    assert one == rows[0]
    assert one["omlx"]["reuse_ended"] == {"reason": "no_block", "token": 48}


async def test_the_snapshot_has_every_key_of_the_contract(
    served: Served, client: ClientSession
) -> None:
    async with client.get(at(served, "/admin/api/stats")) as answer:
        stats = await answer.json()

    for scope in ("session", "alltime"):
        assert stats[scope].keys() >= {
            *("processed_tokens", "cached_tokens", "efficiency", "generated_tokens"),
            *("attribution_stripped", "requests"),
        }
        assert set(stats[scope]["requests"]) == {"completed", "failed", "cancelled", "rejected"}
    assert stats["cache"].keys() >= {
        *("hits", "misses", "cow_copies", "evictions", "evictions_ram", "evictions_ssd"),
        *("shared_blocks", "blocks_total", "blocks_free", "blocks_cached", "hot_bytes"),
        *("hot_limit_bytes", "ssd_bytes", "ssd_limit_bytes", "ssd_files", "incompatible_bytes"),
        *("incompatible_files", "ssd_written_bytes", "ssd_restored_bytes", "pending_bytes"),
        *("pending_limit_bytes", "pending_stops", "corrupt_blocks", "rejected_files"),
        "tier_state",
    }
    assert stats["gdn"].keys() >= {
        *("storage", "codec", "checkpoints", "gdn_checkpoint_loads", "gdn_checkpoint_walkbacks"),
        *("gdn_decode_failures", "pending_bytes", "pending_limit_bytes"),
    }
    assert stats["engine"].keys() >= {
        *("running", "waiting", "last_step_age_s", "prefill_tps", "decode_tps"),
    }
    assert stats["model"].keys() == {"id", "layers", "block_size", "namespace"}


async def test_names_from_clients_are_data_everywhere(
    served: Served, client: ClientSession
) -> None:
    evil = {"client": "<script>1</script>", "model": "<img src=x onerror=alert(1)>"}
    await served.stats.tell(RequestEnded(record(**evil)))
    await served.stats.tell(EngineReport(EngineGauges(), (running_row(**evil),)))

    for path in ("stats", "requests", "requests/req-1", "requests/req-2"):
        async with client.get(at(served, f"/admin/api/{path}")) as answer:
            text = await answer.text()
            assert answer.content_type == "application/json"
        assert "<" not in text
    assert json.loads(text)["client"] == evil["client"]
    async with client.get(at(served, "/admin")) as answer:
        assert "script>1" not in await answer.text()


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("history?res=2s", 400, "res"),
        ("requests?limit=0", 400, "limit"),
        ("requests?limit=1001", 400, "limit"),
        ("requests?limit=+1", 400, "limit"),
        ("requests?limit=x", 400, "limit"),
        ("requests/unknown", 404, "id"),
    ],
)
async def test_what_cannot_be_answered_is_an_error_that_names_the_parameter(
    served: Served, client: ClientSession, path: str, status: int, param: str
) -> None:
    async with client.get(at(served, f"/admin/api/{path}")) as answer:
        error = (await answer.json())["error"]

    assert answer.status == status
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param


async def test_without_its_statistics_the_dashboard_says_busy(
    served: Served, client: ClientSession
) -> None:
    served.stop.set()
    await asyncio.sleep(0.1)

    for path in ("/admin/api/stats", "/admin/api/requests", "/admin/events"):
        async with client.get(at(served, path)) as answer:
            error = (await answer.json())["error"]
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
        assert (error["type"], error["param"], error["code"]) == ("server_error", None, "busy")
    async with client.get(at(served, "/admin")) as answer:
        assert answer.status == 200


# ── events ───────────────────────────────────────────────────────────────────────────────────


async def test_the_events_begin_with_stats_and_tell_of_each_request(
    served: Served, client: ClientSession
) -> None:
    async with asyncio.timeout(5), client.get(at(served, "/admin/events")) as answer:
        assert answer.content_type == "text/event-stream"
        assert await answer.content.readuntil(b"\n\n") == b"retry: 2000\n\n"
        first = await answer.content.readuntil(b"\n\n")
        second = await answer.content.readuntil(b"\n\n")
        await served.stats.tell(RequestEnded(record(id="a")))
        frames = [await answer.content.readuntil(b"\n\n") for _ in range(2)]

    assert first.startswith(b"event: stats\nid: ")
    assert second == b"event: capture\ndata: false\n\n"
    assert sorted(frame.split(b"\n")[0] for frame in frames) == [b"event: request", b"event: stats"]


async def test_a_client_that_leaves_ends_its_feed(served: Served, client: ClientSession) -> None:
    async with client.get(at(served, "/admin/events")) as answer:
        await answer.content.readuntil(b"\n\n")
        await until_readers(served, 1)
        answer.close()

    await until_readers(served, 0)


async def test_the_events_end_when_the_server_stops(served: Served, client: ClientSession) -> None:
    async with asyncio.timeout(5), client.get(at(served, "/admin/events")) as answer:
        await answer.content.readuntil(b"\n\n")
        served.stop.set()

        await answer.content.read()  # to the end


async def test_a_quiet_feed_still_beats(
    served: Served, client: ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "HEARTBEAT_S", 0.05)

    async with asyncio.timeout(5), client.get(at(served, "/admin/events")) as answer:
        for _ in range(3):
            await answer.content.readuntil(b"\n\n")

        assert await answer.content.readuntil(b"\n\n") == b": still here\n\n"
