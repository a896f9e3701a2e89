"""Pages of listed origins may call the API from a browser; no others, and never with cookies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.web.serving import Server, chat, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ModelPath = Callable[[str], Path]
PAGE = "https://app.example"
KEY = "sk-test-ABCDEF123456"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def listed(
    model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    settings: dict[str, Any] = {"cors_origins": f"{PAGE},http://localhost:3000", "api_key": KEY}
    home = tmp_path_factory.mktemp("home")
    async with serving(model_path("tape"), home, **settings) as server:
        yield server


def cors(headers: Any) -> dict[str, str]:
    return {
        name.lower(): value
        for name, value in headers.items()
        if name.lower().startswith("access-control-")
    }


async def preflight(server: Server, path: str, origin: str, **more: str) -> aiohttp.ClientResponse:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        **more,
    }
    async with server.http.options(f"{server.url}{path}", headers=headers) as answer:
        return answer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000", "HTTPS://APP.example"])
async def test_a_listed_origin_may_ask_before_it_sends(
    listed: Server, path: str, origin: str
) -> None:
    """Without a key: a browser sends none with this question."""
    answer = await preflight(listed, path, origin)

    assert answer.status == 204
    found = cors(answer.headers)
    assert found["access-control-allow-origin"] == origin
    assert "POST" in found["access-control-allow-methods"]
    assert found["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in found
    assert "Origin" in answer.headers["Vary"]


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "https://app.example.evil", "http://app.example", "null", "",
     "https://app.example:8443", "*"],
)  # fmt: skip
async def test_no_other_origin_is_invited(listed: Server, origin: str) -> None:
    asked = await preflight(listed, "/v1/chat/completions", origin)
    headers = {"Origin": origin, **AUTHORIZED}
    _, _, sent = await listed.post(chat("x"), headers=headers)

    assert asked.status == 401
    assert not cors(asked.headers)
    assert not cors(sent)
    assert "Origin" in sent["Vary"]


@pytest.mark.parametrize("path", ["/admin/login", "/admin/api/stats", "/admin"])
async def test_the_administration_is_for_our_own_pages(listed: Server, path: str) -> None:
    asked = await preflight(listed, path, PAGE)
    async with listed.http.get(f"{listed.url}{path}", headers={"Origin": PAGE}) as answer:
        sent = answer.headers

    assert not cors(asked.headers)
    assert not cors(sent)


async def test_a_key_is_needed_all_the_same(listed: Server) -> None:
    """And a page may read why it was refused."""
    status, _, headers = await listed.post(chat("x"), headers={"Origin": PAGE})

    assert status == 401
    assert cors(headers)["access-control-allow-origin"] == PAGE


async def test_whole_answers_streams_and_errors_may_be_read(listed: Server) -> None:
    headers = {"Origin": PAGE, **AUTHORIZED}
    for body, path in (
        (chat("x"), "/v1/chat/completions"),
        (chat("x", stream=True), "/v1/chat/completions"),
        ({}, "/v1/chat/completions"),
        ({}, "/nothing"),
    ):
        url = f"{listed.url}{path}"
        async with listed.http.post(url, json=body, headers=headers) as answer:
            await answer.read()
        found = cors(answer.headers)
        assert found["access-control-allow-origin"] == PAGE
        assert "x-request-id" in found["access-control-expose-headers"]


async def test_a_listed_page_may_reach_this_machine_from_a_public_network(listed: Server) -> None:
    asks = {"Access-Control-Request-Private-Network": "true"}
    answer = await preflight(listed, "/v1/models", PAGE, **asks)

    assert cors(answer.headers)["access-control-allow-private-network"] == "true"


async def test_a_foreign_host_is_refused_before_that(listed: Server) -> None:
    answer = await preflight(listed, "/v1/models", PAGE, Host="evil.example")

    assert answer.status == 403


async def test_every_origin_can_be_listed_at_once_and_still_without_cookies(
    model_path: ModelPath, tmp_path: Path
) -> None:
    async with serving(model_path("tape"), tmp_path, cors_origins="*") as server:
        found = cors((await preflight(server, "/v1/models", "https://any.example")).headers)

    assert found["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in found


async def test_without_the_setting_nothing_is_said(server: Server) -> None:
    asked = await preflight(server, "/v1/models", PAGE)
    _, _, sent = await server.post(chat("x"), headers={"Origin": PAGE})

    assert asked.status == 405
    assert not cors(asked.headers)
    assert not cors(sent)
    assert "Vary" not in sent
