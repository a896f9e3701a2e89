"""The chat and connect pages: the API's own handlers, behind the administration's key.

The API's key never reaches a browser: a page calls the same handlers below /admin/api, where its
login opens them, where only our own pages may call, and where no other origin is let in.
"""

from __future__ import annotations

from aiohttp import web

from omlx.web.admin import JSON_HEADERS
from omlx.web.chat_completions import chat_completions
from omlx.web.edge import EDGE
from omlx.web.errors import json_response
from omlx.web.generation import aliases_of, check_ready
from omlx.web.messages import messages
from omlx.web.pages import add_page
from omlx.web.responses import responses


def add_playground(app: web.Application) -> None:
    add_page(app, "/admin/chat", "chat")
    add_page(app, "/admin/connect", "connect")
    app.router.add_get("/admin/api/connect", connect)
    app.router.add_post("/admin/api/v1/chat/completions", chat_completions)
    app.router.add_post("/admin/api/v1/messages", messages)
    app.router.add_post("/admin/api/v1/responses", responses)


async def connect(request: web.Request) -> web.Response:
    """What a client has to be told. The key is not in it, only whether there is one."""
    edge = request.app[EDGE]
    check_ready(edge)
    body = {
        "model": edge.model.id,
        "aliases": aliases_of(edge),
        "context": edge.max_context,
        "api_key": None if edge.loaded.settings.api_key is None else "set",
    }
    return json_response(body, headers=JSON_HEADERS)
