"""Whatever routes the administration has: who may ask, from where, as what, and what goes out."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omlx.web.auth import COOKIE, is_admin, is_page
from omlx.web.login import ADDRESSES_MAX, TRIES_MAX, TRIES_REFILL_S, Tries
from omlx.web.pages import NAV
from omlx.web.server import make_app
from tests.web.serving import Server, serving
from tests.web.test_auth import ADMIN_KEY, API_KEY, JSON, WRONG_KEY, bearer, log_in, routes

pytestmark = pytest.mark.asyncio(loop_scope="module")

READING = ("GET", "HEAD", "OPTIONS")
OPENED_BY_ITSELF = "/admin/login"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def panel(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    home = tmp_path_factory.mktemp("home")
    keys: dict[str, Any] = {"api_key": API_KEY, "admin_key": ADMIN_KEY}
    async with serving(model_path("tape"), home, **keys) as server:
        yield server


def all_routes(server: Server) -> list[tuple[str, str]]:
    return list(routes(make_app(server.app.edge)))


def admin_routes(server: Server) -> list[tuple[str, str]]:
    return [(method, path) for method, path in all_routes(server) if is_admin(path)]


async def ask(server: Server, method: str, path: str, **options: Any) -> tuple[int, dict[str, str]]:
    """Status and headers; the body is not waited for, since one of them never ends."""
    url = f"{server.url}{path}"
    async with server.http.request(method, url, allow_redirects=False, **options) as answer:
        return answer.status, dict(answer.headers)


# ── who ──────────────────────────────────────────────────────────────────────────────────────


async def test_the_routes_that_are_walked_are_those_of_the_panel(panel: Server) -> None:
    known = admin_routes(panel)

    assert {("GET", item.href) for item in NAV} <= set(known)
    assert sum(method not in READING for method, _ in known) >= 5


async def test_the_key_of_the_api_opens_nothing_of_the_panel(panel: Server) -> None:
    for method, path in admin_routes(panel):
        if path == OPENED_BY_ITSELF:
            continue
        status, _ = await ask(panel, method, path, headers=bearer(API_KEY) | JSON, data=b"{}")
        assert status == (303 if method == "GET" and is_page(path) else 401), f"{method} {path}"


async def test_neither_the_panels_key_nor_its_cookie_opens_the_api(panel: Server) -> None:
    value = (await log_in(panel, ADMIN_KEY)).cookies[COOKIE].value
    for method, path in all_routes(panel):
        if is_admin(path) or path == "/health" or path.startswith("/static/"):
            continue
        for headers in (bearer(ADMIN_KEY), {"Cookie": f"{COOKIE}={value}"}):
            status, _ = await ask(panel, method, path, headers=headers | JSON, data=b"{}")
            assert status == 401, f"{method} {path}"


async def test_the_cookie_opens_every_page(panel: Server) -> None:
    value = (await log_in(panel, ADMIN_KEY)).cookies[COOKIE].value
    for item in NAV:
        status, _ = await ask(panel, "GET", item.href, headers={"Cookie": f"{COOKIE}={value}"})
        assert status == 200, item.href


# ── from where, and as what ──────────────────────────────────────────────────────────────────


async def test_a_foreign_host_is_refused_on_every_route(panel: Server) -> None:
    for method, path in all_routes(panel):
        headers = {"Host": "evil.example", **bearer(ADMIN_KEY)}
        status, _ = await ask(panel, method, path, headers=headers)
        assert status == 403, f"{method} {path}"


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
     {"Sec-Fetch-Site": "same-site"}],
)  # fmt: skip
async def test_another_site_changes_nothing(panel: Server, headers: dict[str, str]) -> None:
    for method, path in admin_routes(panel):
        if method not in READING:
            given = {**headers, **bearer(ADMIN_KEY), **JSON}
            status, _ = await ask(panel, method, path, headers=given, data=b"{}")
            assert status == 403, f"{method} {path}"


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "application/xml"])
async def test_what_a_form_can_send_changes_nothing(panel: Server, kind: str) -> None:
    for method, path in admin_routes(panel):
        if method not in READING:
            headers = {**bearer(ADMIN_KEY), "Content-Type": kind}
            status, _ = await ask(panel, method, path, headers=headers, data=b"{}")
            assert status == 415, f"{method} {path}"


# ── what goes out ────────────────────────────────────────────────────────────────────────────


async def test_every_answer_of_the_panel_is_kept_by_nobody_and_framed_nowhere(
    panel: Server,
) -> None:
    for key in (ADMIN_KEY, WRONG_KEY):
        for method, path in admin_routes(panel):
            if method == "HEAD":
                continue
            _, headers = await ask(panel, method, path, headers=bearer(key) | JSON, data=b"{")
            said = f"{method} {path}"
            assert headers["Cache-Control"] == "no-store", said
            assert headers["X-Content-Type-Options"] == "nosniff", said
            assert headers["Referrer-Policy"] == "no-referrer", said
            assert headers["X-Frame-Options"] == "DENY", said
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin", said
            assert not [name for name in headers if name.startswith("Access-Control-")], said


async def test_every_page_runs_our_own_scripts_only(panel: Server) -> None:
    for path in [OPENED_BY_ITSELF, *(item.href for item in NAV)]:
        async with panel.http.get(f"{panel.url}{path}", headers=bearer(ADMIN_KEY)) as answer:
            html = await answer.text()
        policy = answer.headers["Content-Security-Policy"]
        directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
        assert directives == {
            "default-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'self'",
            "frame-ancestors": "'none'",
            "object-src": "'none'",
        }
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", html)
        assert not re.findall(r'(?:src|href)="(?:https?:)?//', html), path


async def test_no_answer_of_the_panel_holds_a_key(panel: Server) -> None:
    for method, path in admin_routes(panel):
        if method != "GET" or path == "/admin/events":
            continue
        async with panel.http.get(f"{panel.url}{path}", headers=bearer(ADMIN_KEY)) as answer:
            text = await answer.text()
        assert not [key for key in (API_KEY, ADMIN_KEY) if key in text], path


async def test_the_connect_page_tells_whether_there_is_a_key_and_no_more(panel: Server) -> None:
    headers = bearer(ADMIN_KEY)
    async with panel.http.get(f"{panel.url}/admin/api/connect", headers=headers) as answer:
        told = json.loads(await answer.read())

    assert told == {"model": panel.model, "aliases": [], "context": told["context"],
                    "api_key": "set"}  # fmt: skip
    assert told["context"] > 0


# ── guessing ─────────────────────────────────────────────────────────────────────────────────


async def test_who_guesses_at_the_login_has_to_wait(panel: Server) -> None:
    answers = [await log_in(panel, WRONG_KEY) for _ in range(TRIES_MAX + 1)]
    answer = answers[-1]

    assert answers[0].status == 401
    assert answer.status == 429
    assert 1 <= int(answer.headers["Retry-After"]) <= TRIES_REFILL_S
    assert (await log_in(panel, ADMIN_KEY)).status == 429, "or the wait would tell a right key"


async def test_wrong_keys_are_forgiven_with_time_and_counted_by_address() -> None:
    tries = Tries()
    for _ in range(TRIES_MAX):
        assert tries.wait_s("here", 100.0) == 0
        tries.spend("here", 100.0)

    assert tries.wait_s("here", 100.0) == TRIES_REFILL_S
    assert tries.wait_s("there", 100.0) == 0
    assert tries.wait_s("here", 100.0 + TRIES_REFILL_S) == 0
    tries.spend("here", 100.0 + TRIES_REFILL_S)
    assert tries.wait_s("here", 100.0 + TRIES_REFILL_S) == TRIES_REFILL_S
    later = 200.0 + TRIES_MAX * TRIES_REFILL_S
    assert [tries.wait_s("here", later + n) for n in (0, 9e9)] == [0, 0]


async def test_no_more_addresses_are_remembered_than_there_is_room_for() -> None:
    tries = Tries()
    for number in range(ADDRESSES_MAX + 10):
        tries.spend(str(number), 0.0)

    assert len(tries._buckets) == ADDRESSES_MAX
