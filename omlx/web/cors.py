"""Which web pages of other origins may call the API from a browser: those listed, and no other.

The administration is for our own pages alone, and cookies are never allowed along.
"""

from __future__ import annotations

from aiohttp import web

from omlx.web.auth import is_admin
from omlx.web.edge import EDGE
from omlx.web.errors import Handler

METHODS = "GET, POST, OPTIONS"
EXPOSED = "x-request-id, request-id, x-omlx-cached, x-omlx-ignored, retry-after"
MAX_AGE_S = 600
"""A browser asks again after that long."""


@web.middleware
async def cors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what a browser asks before it sends a request. It can't send a key with that."""
    asks = "Access-Control-Request-Method" in request.headers
    if request.method != "OPTIONS" or not asks or _allowed_origin(request) is None:
        return await handler(request)
    headers = {
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }
    wanted = request.headers.get("Access-Control-Request-Headers")
    if wanted:
        headers["Access-Control-Allow-Headers"] = wanted
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """A signal handler, so that errors and streams have them as well."""
    if not request.app[EDGE].loaded.settings.cors_origins or is_admin(request.path):
        return
    response.headers.add("Vary", "Origin")
    origin = _allowed_origin(request)
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = EXPOSED


def _allowed_origin(request: web.Request) -> str | None:
    """What to say to this request's origin; None when it is not listed."""
    origin = request.headers.get("Origin")
    if origin is None or is_admin(request.path):
        return None
    listed = request.app[EDGE].loaded.settings.cors_origins
    if "*" in listed:
        return "*"
    return origin if origin.lower() in listed else None
