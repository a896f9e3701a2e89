"""The description of the API says what the server does: its routes, its checks, its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from omlx.web.openapi import OPERATIONS, document
from tests.web.serving import Server, chat, serving
from tests.web.test_routes import api_routes

KEY = "a-key-of-sixteen-letters"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def body_schema(path: str) -> jsonschema.Draft202012Validator:
    found = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return jsonschema.Draft202012Validator({**document(), **found["schema"]})


async def test_every_route_is_described_and_no_other(tmp_path: Path) -> None:
    described = {
        (method.upper(), path)
        for path, methods in document()["paths"].items()
        for method in methods
    }

    assert described == api_routes(tmp_path) == set(OPERATIONS)


async def test_each_reference_leads_somewhere() -> None:
    text = json.dumps(document())
    names = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}

    assert names
    assert names <= document()["components"]["schemas"].keys()


async def test_the_schemas_are_valid() -> None:
    for schema in document()["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("path", "body", "valid"),
    [
        ("/v1/chat/completions", chat("hi", n=1), True),
        ("/v1/chat/completions", chat("hi", n=0), False),
        ("/v1/chat/completions", {"messages": []}, False),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}, True),
        ("/v1/completions", {"prompt": [True]}, False),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}, True),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}, False),
        ("/v1/responses", {"input": [{"role": "user", "content": "hi"}]}, True),
        ("/v1/responses", {"input": [{"type": "web_search_call"}]}, False),
        ("/tokenize", {"content": "hi"}, True),
        ("/tokenize", {"content": 5}, False),
    ],
)
async def test_what_the_description_allows_is_what_is_answered(
    server: Server, path: str, body: dict[str, Any], valid: bool
) -> None:
    assert body_schema(path).is_valid(body) is valid

    status, _, _ = await server.post(body, path)

    assert status == (200 if valid else 400)


async def test_it_needs_the_key_that_the_api_needs(server: Server, tmp_path: Path) -> None:
    async with server.http.get(f"{server.url}/openapi.json") as answer:
        assert answer.status == 200
        assert await answer.json() == document()

    model = server.app.edge.loaded.settings.model
    async with serving(Path(str(model)), tmp_path, api_key=KEY) as locked:
        url = f"{locked.url}/openapi.json"
        async with locked.http.get(url) as answer:
            assert answer.status == 401
        async with locked.http.get(url, headers={"x-api-key": KEY}) as answer:
            assert answer.status == 200
