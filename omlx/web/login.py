"""The one page that opens without a key: it takes the key and gives a cookie."""

from __future__ import annotations

import math
import time
from collections import OrderedDict

import orjson
from aiohttp import web

from omlx.web.auth import COOKIE, admin_key, cookie_value, same
from omlx.web.edge import EDGE
from omlx.web.errors import ApiError, invalid, json_response
from omlx.web.pages import add_page

TRIES_MAX = 20
TRIES_REFILL_S = 6.0
"""So many wrong keys at once, and one more after each of these: 14,400 a day for a guesser."""

ADDRESSES_MAX = 1024
"""Guessers remembered. Beyond, the one who has not tried for longest is forgotten."""


class Tries:
    """How many wrong keys each address may still send: buckets that refill with time.

    For each address its own, so that a guesser elsewhere does not lock out who knows the key.
    Times are seconds of any clock that only goes on.
    """

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What was left in each, and when."""

    def wait_s(self, address: str, now: float) -> float:
        """How long ``address`` must wait before its next try; 0 when it has one left."""
        left = self._left(address, now)
        return 0.0 if left >= 1 else (1 - left) * TRIES_REFILL_S

    def spend(self, address: str, now: float) -> None:
        """A key from ``address`` was wrong."""
        self._buckets[address] = (self._left(address, now) - 1, now)
        self._buckets.move_to_end(address)
        if len(self._buckets) > ADDRESSES_MAX:
            self._buckets.popitem(last=False)

    def _left(self, address: str, now: float) -> float:
        left, as_of = self._buckets.get(address, (TRIES_MAX, now))
        return min(TRIES_MAX, left + (now - as_of) / TRIES_REFILL_S)


TRIES: web.AppKey[Tries] = web.AppKey("tries", Tries)


def add_login(app: web.Application) -> None:
    app[TRIES] = Tries()
    add_page(app, "/admin/login", "login", nav=())
    app.router.add_post("/admin/login", login)


async def login(request: web.Request) -> web.Response:
    wanted = admin_key(request.app[EDGE].loaded.settings)
    try:
        body = orjson.loads(await request.read())
        given = body["key"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise invalid('Send {"key": "..."}.', "key", "missing_field") from None
    tries, address, now = request.app[TRIES], request.remote or "", time.monotonic()
    wait_s = tries.wait_s(address, now)
    if wait_s > 0:
        raise ApiError(
            429,
            "Too many wrong keys. Try again later.",
            kind="rate_limit_error",
            code="too_many_tries",
            headers={"Retry-After": str(math.ceil(wait_s))},
        )
    if wanted is None or not isinstance(given, str) or not same(given, wanted):
        tries.spend(address, now)
        raise ApiError(
            401, "This key is not valid.", kind="authentication_error", code="invalid_api_key"
        )
    response = json_response({"ok": True})
    # For /admin alone: the API never sees it. Any other server on this host name would.
    response.set_cookie(
        COOKIE,
        cookie_value(wanted),
        httponly=True,
        samesite="Strict",
        secure=request.secure,
        path="/admin",
    )
    return response
