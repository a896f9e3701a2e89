"""Nothing answers to somebody who should not ask, on any route, and no key is ever told."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from omlx.web.auth import COOKIE, cookie_value, is_page, same
from omlx.web.server import make_app
from tests.web.serving import Server, chat, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ModelPath = Callable[[str], Path]
API_KEY = "sk-test-ABCDEF123456"
ADMIN_KEY = "sk-admin-GHIJKL7890"
WRONG_KEY = "sk-wrong-XYZ987654"
KEYS = (API_KEY, ADMIN_KEY, WRONG_KEY)
OPEN = {"/health", "/admin/login"}


async def started(
    model_path: ModelPath, factory: pytest.TempPathFactory, **settings: Any
) -> AsyncIterator[Server]:
    async with serving(model_path("tape"), factory.mktemp("home"), **settings) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def locked(
    model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    """One key opens everything."""
    async for server in started(model_path, tmp_path_factory, api_key=API_KEY):
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parted(
    model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    """One key for the API, another for the administration."""
    keys = {"api_key": API_KEY, "admin_key": ADMIN_KEY, "allowed_hosts": ["omlx.test"]}
    async for server in started(model_path, tmp_path_factory, **keys):
        yield server


def routes(app: web.Application) -> Iterator[tuple[str, str]]:
    """Each method and a path of each route that the application has."""
    for route in app.router.routes():
        info: Any = route.get_info()
        path = info.get("path") or info.get("formatter") or f"{info['prefix']}/app.js"
        yield route.method, re.sub(r"\{[^}]*\}", "x", path)


async def status(server: Server, method: str, path: str, **headers: str) -> int:
    url = f"{server.url}{path}"
    async with server.http.request(method, url, headers=headers, allow_redirects=False) as answer:
        return answer.status


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


JSON = {"Content-Type": "application/json"}


# ── every route ──────────────────────────────────────────────────────────────────────────────


async def test_every_route_but_the_open_ones_needs_a_key(locked: Server) -> None:
    """B40: whatever routes there are. Pages send a person to the login instead."""
    known = list(routes(make_app(locked.app.edge)))
    assert len(known) > 10

    for method, path in known:
        if path in OPEN or path.startswith("/static/"):
            continue
        found = await status(locked, method, path, **JSON)
        if method == "GET" and is_page(path):
            assert found == 303, path
        else:
            assert found == 401, f"{method} {path}"


async def test_every_route_opens_with_the_key(locked: Server) -> None:
    for method, path in routes(make_app(locked.app.edge)):
        if method == "GET":
            found = await status(locked, method, path, **bearer(API_KEY))
            assert found not in (401, 403, 500), path


async def test_the_answer_to_head_has_no_body(locked: Server) -> None:
    """What follows it on the connection would be taken for the next answer."""
    for method, path in routes(make_app(locked.app.edge)):
        if method == "HEAD":
            request = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {API_KEY}\r\n"
            raw = await locked.raw(request.encode() + b"Connection: close\r\n\r\n", at_most=400)
            assert raw.partition(b"\r\n\r\n")[2] == b"", path


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/",
        "/v1/chat/completions/",
        "/V1/models",
        "/ADMIN",
        "/Admin/api/stats",
        "/metrics",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/admin/api/settings",
        "/admin/api/cache/clear",
        "/v1/messages",
        "/v1/messages/",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/responses",
        "/completions",
        "/models",
        "/nothing",
        "/",
        "/health/",
        "/healthz",
        "/admin/loginx",
        "/admin/login/",
    ],
)
async def test_no_spelling_and_no_method_gets_in_without_a_key(
    locked: Server, method: str, path: str
) -> None:
    """B40."""
    found = await status(locked, method, path, **JSON)

    assert found == 401 or (found == 303 and method == "GET" and path.startswith("/admin/"))


@pytest.mark.parametrize(
    "target",
    [
        b"//admin",
        b"//admin/api/stats",
        b"/static/../admin/api/stats",
        b"/static/..%2fadmin/api/stats",
        b"/static/%2e%2e/admin/api/stats",
        b"/static/%2e%2e/%2e%2e/pyproject.toml",
        b"/static/..%2f..%2f..%2f..%2f..%2f..%2f..%2fetc/passwd",
        b"/health/../v1/models",
        b"/health%2f..%2fv1/models",
        b"/health;/v1/models",
        b"/admin/login/../api/stats",
        b"/admin/login%2f..%2fapi/stats",
        b"/%61dmin/api/stats",
        b"/admin/./api/stats",
        b"http://localhost/v1/models",
        b"/v1/models?api_key=" + API_KEY.encode(),
        b"/v1/models?key=" + API_KEY.encode(),
        b"/health?/../v1/models",
    ],
)
async def test_no_way_around_leads_to_what_is_locked(locked: Server, target: bytes) -> None:
    """B38, B40, B41: raw paths, as no polite client sends them."""
    raw = await locked.raw(
        b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )

    code, body = raw.split()[1], raw.partition(b"\r\n\r\n")[2]
    assert code in (b"303", b"400", b"401", b"403", b"404") or body.startswith(b'{"status"')
    assert b"session" not in body
    assert b"owned_by" not in body
    assert b"root:" not in body


async def test_static_files_and_the_login_page_are_open(locked: Server) -> None:
    for path in ("/health", "/admin/login", "/static/icon.svg"):
        assert await status(locked, "GET", path) == 200


# ── keys ─────────────────────────────────────────────────────────────────────────────────────

RIGHT = [
    {"Authorization": f"Bearer {API_KEY}"},
    {"authorization": f"bearer {API_KEY}"},
    {"Authorization": f"BEARER  {API_KEY}"},
    {"x-api-key": API_KEY},
    {"X-API-Key": API_KEY},
    {"Authorization": f"Bearer {API_KEY}", "x-api-key": API_KEY},
]
WRONG = [
    {},
    {"Authorization": "Bearer "},
    {"Authorization": "Bearer"},
    {"Authorization": f"Bearer {WRONG_KEY}"},
    {"Authorization": f"Basic {API_KEY}"},
    {"Authorization": API_KEY},
    {"Authorization": f"Bearer {API_KEY}x"},
    {"Authorization": f"Bearer {API_KEY[:-1]}"},
    {"Authorization": f"Bearer {API_KEY.lower()}"},
    {"Authorization": f"Bearer {API_KEY} {API_KEY}"},
    {"Authorization": "Bearer schlüssel"},
    {"x-api-key": ""},
    {"x-api-key": WRONG_KEY},
    {"x-api-key": "\u00ff" * 20},
    {"Authorization": f"Bearer {API_KEY}", "x-api-key": WRONG_KEY},
    {"Authorization": f"Bearer {WRONG_KEY}", "x-api-key": API_KEY},
    {"Authorization": "", "x-api-key": API_KEY},
    {"Cookie": f"{COOKIE}={API_KEY}"},
]


@pytest.mark.parametrize("headers", RIGHT)
async def test_a_key_is_taken_in_every_usual_form(locked: Server, headers: dict[str, str]) -> None:
    """B104."""
    code, _, _ = await locked.post(chat("key"), headers=headers)

    assert code == await status(locked, "GET", "/v1/models", **headers) == 200


@pytest.mark.parametrize("headers", WRONG)
async def test_anything_else_is_refused_with_the_dialects_error(
    locked: Server, headers: dict[str, str]
) -> None:
    """B104: also two keys of which one is wrong."""
    code, answer, sent = await locked.post(chat("key"), headers=headers)

    assert code == 401
    assert sent["WWW-Authenticate"] == "Bearer"
    assert answer["error"]["type"] == "authentication_error"
    assert answer["error"]["code"] == "invalid_api_key"
    assert await status(locked, "GET", "/v1/models", **headers) == 401


async def test_the_other_dialect_has_its_own_error(locked: Server) -> None:
    """B104."""
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/messages"):
        code, answer, sent = await locked.post({}, path, headers=bearer(WRONG_KEY))
        assert code == 401
        assert sent["WWW-Authenticate"] == "Bearer"
        assert answer["error"]["type"] == "authentication_error"
        assert answer["request_id"] == sent["request-id"]


async def test_a_key_is_checked_before_the_body_is_looked_at(locked: Server) -> None:
    code, answer, _ = await locked.post(b"{bad")

    assert (code, answer["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    "headers", [{}, bearer("not-needed"), {"x-api-key": "x"}, {"Authorization": "Basic Og=="}]
)
async def test_without_a_key_configured_any_key_will_do(
    server: Server, headers: dict[str, str]
) -> None:
    """B104: proxies always send some text."""
    code, _, _ = await server.post(chat("any"), headers=headers)

    assert code == await status(server, "GET", "/admin/api/stats", **headers) == 200


@pytest.mark.parametrize(
    ("path", "key", "expected"),
    [
        ("/v1/models", API_KEY, 200),
        ("/v1/models", ADMIN_KEY, 401),
        ("/admin", ADMIN_KEY, 200),
        ("/admin", API_KEY, 303),
        ("/admin/api/stats", ADMIN_KEY, 200),
        ("/admin/api/stats", API_KEY, 401),
        ("/admin/events", API_KEY, 401),
    ],
)
async def test_each_of_two_keys_opens_its_own_part(
    parted: Server, path: str, key: str, expected: int
) -> None:
    assert await status(parted, "GET", path, **bearer(key)) == expected


@pytest.mark.parametrize("given", ["", "k", "key!", "KEY", "schlüssel", "\udce4", "key\0"])
async def test_keys_are_compared_whole_and_byte_by_byte(given: str) -> None:
    assert not same(given, "key")
    assert same("key", "key")


# ── the login ────────────────────────────────────────────────────────────────────────────────


async def log_in(server: Server, key: object, **headers: str) -> aiohttp.ClientResponse:
    url = f"{server.url}/admin/login"
    async with server.http.post(url, json={"key": key}, headers=headers) as answer:
        await answer.read()
        return answer


async def test_logging_in_gives_a_cookie_that_opens_the_administration_and_nothing_else(
    parted: Server,
) -> None:
    answer = await log_in(parted, ADMIN_KEY)

    morsel = answer.cookies[COOKIE]
    cookie = {"Cookie": f"{COOKIE}={morsel.value}"}
    assert answer.status == 200
    assert morsel["httponly"]
    assert morsel["samesite"] == "Strict"
    assert morsel["path"] == "/admin"
    assert len(morsel.value) < 100
    assert ADMIN_KEY not in answer.headers["Set-Cookie"]
    assert await status(parted, "GET", "/admin", **cookie) == 200
    assert await status(parted, "GET", "/admin/api/stats", **cookie) == 200
    assert await status(parted, "GET", "/v1/models", **cookie) == 401


@pytest.mark.parametrize("key", [API_KEY, WRONG_KEY, "", None, 5, [], {}, "\u00ff"])
async def test_a_wrong_key_gives_no_cookie(parted: Server, key: object) -> None:
    answer = await log_in(parted, key)

    assert answer.status == 401
    assert not answer.cookies


@pytest.mark.parametrize("body", [b"", b"{bad", b"[]", b'"x"', b"7", b"{}", b'{"key": "\\ud800"}'])
async def test_a_login_that_is_malformed_is_refused(parted: Server, body: bytes) -> None:
    code, answer, _ = await parted.post(body, "/admin/login", headers=JSON)

    assert code == 400
    assert answer["error"]["param"] == "key"


async def test_a_cookie_that_we_did_not_give_opens_nothing(parted: Server) -> None:
    for value in ("", "x", ADMIN_KEY, cookie_value(API_KEY), "é", "a" * 64):
        cookie = {"Cookie": f"{COOKIE}={value}"}
        assert await status(parted, "GET", "/admin/api/stats", **cookie) == 401


async def test_where_no_key_is_set_there_is_nothing_to_log_in_to(server: Server) -> None:
    assert (await log_in(server, "anything")).status == 401


# ── hosts and origins ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST", "127.0.0.1", "[::1]", "localhost:1", "127.0.0.9", "omlx.test:80",
     "OMLX.TEST"],
)  # fmt: skip
async def test_names_of_this_machine_are_served_whatever_the_port(
    parted: Server, host: str
) -> None:
    assert await status(parted, "GET", "/health", Host=host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
     "192.168.0.1", "0.0.0.0", "omlx.test.evil", "localhost@evil.example", "[::2]", "[", "[::1",
     "[x]", "user:pass@evil.example:80", "localhost evil.example"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/admin", "/static/x", "/nothing"])
async def test_any_other_name_is_refused_on_every_route(
    parted: Server, host: str, path: str
) -> None:
    """A page elsewhere must not reach us by pointing its own name here; a key does not help."""
    url = f"{parted.url}{path}"
    async with parted.http.get(url, headers={"Host": host, **bearer(API_KEY)}) as answer:
        assert answer.status == 403
        assert (await answer.json())["error"]["code"] == "host_not_allowed"


def foreign(server: Server) -> list[dict[str, str]]:
    own = f"http://127.0.0.1:{server.port}"
    return [
        {"Origin": "http://evil.example"},
        {"Origin": f"{own}.evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": own, "Sec-Fetch-Site": "cross-site"},
    ]


async def test_changes_are_taken_from_our_own_pages_only(parted: Server) -> None:
    for headers in foreign(parted):
        answer = await log_in(parted, ADMIN_KEY, **headers)
        assert answer.status == 403, headers
        assert not answer.cookies
    own = f"http://127.0.0.1:{parted.port}"
    for headers in ({"Origin": own, "Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
        assert (await log_in(parted, ADMIN_KEY, **headers)).status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_changes_are_taken_as_json_only(parted: Server, kind: str) -> None:
    """What a form of another page can send without being asked is none."""
    body = json.dumps({"key": ADMIN_KEY}).encode()

    code, answer, _ = await parted.post(body, "/admin/login", headers={"Content-Type": kind})

    assert (code, answer["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
async def test_no_other_origin_is_invited(parted: Server, method: str) -> None:
    headers = {
        "Origin": "http://evil.example",
        "Access-Control-Request-Method": "POST",
        **bearer(API_KEY),
    }
    async with parted.http.request(method, f"{parted.url}/v1/models", headers=headers) as answer:
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


# ── nothing is told ──────────────────────────────────────────────────────────────────────────


async def test_no_key_is_in_any_answer_or_in_the_log(
    parted: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """B38: right or wrong, in whatever place it came."""
    caplog.set_level(logging.DEBUG)
    said: list[str] = []

    async def ask(method: str, path: str, **options: Any) -> None:
        url = f"{parted.url}{path}"
        async with parted.http.request(method, url, allow_redirects=False, **options) as answer:
            said.append(str(answer.headers))
            if answer.content_type == "text/event-stream" and path == "/admin/events":
                said.append((await answer.content.readuntil(b"\n\n")).decode())
            else:
                said.append(await answer.text())

    for method, path in routes(make_app(parted.app.edge)):
        for key in KEYS if method != "HEAD" else ():
            await ask(method, path, headers=bearer(key) | JSON, data=b"{}")
            await ask(method, path, headers={"x-api-key": key} | JSON, data=b"{bad")
    for key in KEYS:
        await ask("GET", f"/v1/models?api_key={key}")
        await ask("POST", "/admin/login", json={"key": key})
        await ask("POST", "/v1/chat/completions", headers=bearer(API_KEY), json=chat("x", n=2))
        said.append(repr(await parted.raw(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nx-api-key : " + key.encode() + b"\r\n\r\n"
        )).partition("\\r\\n\\r\\n")[0])  # fmt: skip
    await asyncio.sleep(0)

    everything = "\n".join([*said, caplog.text, *map(repr, (parted.app.settings,))])
    assert not [key for key in KEYS if key in everything]


async def test_the_statistics_hold_no_text_of_anybody(server: Server) -> None:
    """B40: neither of prompts nor of answers."""
    await server.chat("a secret that nobody should read")

    for path in ("/admin/api/stats", "/admin/api/requests", "/health", "/v1/models"):
        async with server.http.get(f"{server.url}{path}") as answer:
            text = await answer.text()
        assert "secret" not in text
        assert "alpha beta" not in text
