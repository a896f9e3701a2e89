"""The admin API of requests: stopping one, and keeping what they say for a person to look at.

Who may ask, and from where, is settled before (``auth``): a POST is JSON, and from our own pages.
"""

from __future__ import annotations

from aiohttp import web

from omlx.actors.admin_messages import CancelRequest
from omlx.web.admin import JSON_HEADERS
from omlx.web.body import Loose, parse
from omlx.web.captures import KEPT_MAX
from omlx.web.edge import EDGE
from omlx.web.errors import ApiError, json_response
from omlx.web.generation import helpers_of
from omlx.web.pages import add_page


class CaptureIn(Loose):
    on: bool


def add_admin_requests(app: web.Application) -> None:
    add_page(app, "/admin/requests", "requests")
    app.router.add_post("/admin/api/requests/{id}/cancel", cancel)
    app.router.add_get("/admin/api/requests/{id}/text", text)
    app.router.add_get("/admin/api/capture", capture)
    app.router.add_post("/admin/api/capture", set_capture)


async def cancel(request: web.Request) -> web.Response:
    """Its client gets an error, and what was computed is kept for the next request."""
    scheduler = helpers_of(request.app[EDGE]).scheduler
    if not await scheduler.ask(CancelRequest(request.match_info["id"])):
        raise ApiError(
            404, "No such request is running; it may have ended.", param="id", code="not_found"
        )
    return json_response({"cancelled": True}, headers=JSON_HEADERS)


async def text(request: web.Request) -> web.Response:
    found = request.app[EDGE].captures.find(request.match_info["id"])
    if found is None:
        raise ApiError(
            404, "The texts of this request were not kept.", param="id", code="not_found"
        )
    answers = [answer for _, answer in sorted(found.answers.items())]
    body = {"prompt": found.prompt, "answers": answers, "cut": found.cut}
    return json_response(body, headers=JSON_HEADERS)


async def capture(request: web.Request) -> web.Response:
    captures = request.app[EDGE].captures
    body = {"on": captures.on, "kept": captures.ids(), "kept_max": KEPT_MAX}
    return json_response(body, headers=JSON_HEADERS)


async def set_capture(request: web.Request) -> web.Response:
    """Off forgets every text at once."""
    request.app[EDGE].captures.switch(parse(CaptureIn, await request.read()).on)
    return await capture(request)
