"""The one page that opens without a key: it takes the key and gives a cookie."""

from __future__ import annotations

import jinja2
import orjson
from aiohttp import web

from omlx.resources import resource_dir
from omlx.web.auth import COOKIE, admin_key, cookie_value, same
from omlx.web.edge import EDGE
from omlx.web.errors import ApiError, invalid, json_response

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def add_login(app: web.Application) -> None:
    app.router.add_get("/admin/login", login_page)
    app.router.add_post("/admin/login", login)


async def login_page(request: web.Request) -> web.Response:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resource_dir("templates")), autoescape=True
    )
    page = environment.get_template("login.html").render(title="Sign in", nav=(), path="")
    return web.Response(text=page, content_type="text/html", headers=PAGE_HEADERS)


async def login(request: web.Request) -> web.Response:
    wanted = admin_key(request.app[EDGE].loaded.settings)
    try:
        body = orjson.loads(await request.read())
        given = body["key"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise invalid('Send {"key": "..."}.', "key", "missing_field") from None
    if wanted is None or not isinstance(given, str) or not same(given, wanted):
        raise ApiError(
            401, "This key is not valid.", kind="authentication_error", code="invalid_api_key"
        )
    response = json_response({"ok": True})
    response.set_cookie(COOKIE, cookie_value(wanted), httponly=True, samesite="Strict", path="/")
    return response
