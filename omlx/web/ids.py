"""Each request has one id: in its answer, in the headers of the answer, in the log and the list."""

from __future__ import annotations

import secrets

from aiohttp import web

_ID: web.RequestKey[str] = web.RequestKey("omlx_request_id", str)


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def request_id(request: web.Request) -> str:
    """``req_...`` until its answer has a name of its own."""
    if _ID not in request:
        request[_ID] = new_id("req_")
    return request[_ID]


def set_request_id(request: web.Request, name: str) -> None:
    request[_ID] = name


async def add_id_headers(request: web.Request, response: web.StreamResponse) -> None:
    """A signal handler. OpenAI's client reads the one header, Anthropic's the other."""
    response.headers["x-request-id"] = response.headers["request-id"] = request_id(request)
