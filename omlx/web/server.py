"""The aiohttp application: middlewares, routes, and /health."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from omlx.actors.stats_messages import Snapshot
from omlx.kernel.message import ActorGone, MailboxFull
from omlx.web.admin import add_admin
from omlx.web.admin_cache import add_admin_cache
from omlx.web.admin_requests import add_admin_requests
from omlx.web.admin_settings import add_settings
from omlx.web.auth import (
    add_admin_headers,
    host_middleware,
    key_middleware,
    origin_middleware,
)
from omlx.web.body import length_middleware
from omlx.web.chat_completions import add_chat_completions
from omlx.web.completions import add_completions
from omlx.web.cors import add_cors_headers, cors_middleware
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import error_middleware, json_response
from omlx.web.ids import add_id_headers
from omlx.web.login import add_login
from omlx.web.messages import add_messages
from omlx.web.metrics import add_metrics
from omlx.web.model_list import add_models
from omlx.web.openapi import add_openapi
from omlx.web.playground import add_playground
from omlx.web.prompts import add_prompts
from omlx.web.responses import add_responses

STALLED_S = 30.0
"""Work is pending and the engine has made no step for so long: not healthy."""

HEADER_MAX = 64 * 1024
"""Cookies of other local servers alone can exceed the framework's 8 kB."""


def make_app(edge: Edge) -> web.Application:
    limit = edge.loaded.settings.body_max_size.resolve(0)
    app = web.Application(
        client_max_size=limit,
        middlewares=[
            error_middleware,
            host_middleware,
            cors_middleware,
            key_middleware,
            origin_middleware,
            length_middleware,
        ],
    )
    app[EDGE] = edge
    app.router.add_get("/health", health)
    app.on_response_prepare.append(add_id_headers)
    app.on_response_prepare.append(add_cors_headers)
    app.on_response_prepare.append(add_admin_headers)
    add_models(app)
    add_chat_completions(app)
    add_completions(app)
    add_messages(app)
    add_responses(app)
    add_prompts(app)
    add_openapi(app)
    add_admin(app)
    add_admin_cache(app)
    add_admin_requests(app)
    add_metrics(app)
    add_playground(app)
    add_settings(app)
    add_login(app)
    return app


class NoMalformedRequests(logging.Filter):
    """What can't be parsed is answered with 400; its bytes may hold a key and are not logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def make_runner(app: web.Application) -> web.AppRunner:
    logger = logging.getLogger("omlx.http")
    logger.addFilter(NoMalformedRequests())
    # Clients that go away re-send later; without handler_cancellation the first handler would
    # run to its end for nobody.
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=logger,
        max_line_size=HEADER_MAX,
        max_field_size=HEADER_MAX,
        shutdown_timeout=1.0,
    )


async def health(request: web.Request) -> web.Response:
    """200 only while the server is alive *and* makes progress."""
    edge = request.app[EDGE]
    if edge.state != "ready":
        return json_response({"status": edge.state}, 503, {"Retry-After": "2"})
    try:
        snapshot: dict[str, Any] = orjson.loads(await edge.stats.ask(Snapshot()))
    except (ActorGone, MailboxFull) as error:
        return json_response({"status": "degraded", "reason": str(error)}, 503)
    engine = snapshot["engine"]
    age = engine["last_step_age_s"]
    if age > STALLED_S:
        reason = f"work is pending and the engine made no step for {age:.0f} s"
        return json_response(
            {"status": "engine_stalled", "reason": reason, "last_step_age_s": age}, 503
        )
    return json_response({"status": "ok", "model": edge.model.id})
