"""The models, as the clients of either dialect ask for them: one path, two shapes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from omlx.web.edge import EDGE, Edge
from omlx.web.errors import is_anthropic, json_response
from omlx.web.generation import aliases_of, check_ready, served_model


def add_models(app: web.Application) -> None:
    for prefix in ("/v1", ""):
        app.router.add_get(f"{prefix}/models", list_models)
        app.router.add_get(f"{prefix}/models/{{id:.+}}", show_model)


async def list_models(request: web.Request) -> web.Response:
    """Exactly the names that are accepted as ``model``, all of them on one page."""
    edge = request.app[EDGE]
    check_ready(edge)
    names = [edge.model.id, *aliases_of(edge)]
    if not is_anthropic(request):
        return json_response({"object": "list", "data": [_openai(edge, name) for name in names]})
    return json_response(
        {
            "data": [_anthropic(edge, name) for name in names],
            "has_more": False,
            "first_id": names[0],
            "last_id": names[-1],
        }
    )


async def show_model(request: web.Request) -> web.Response:
    edge = request.app[EDGE]
    check_ready(edge)
    name = request.match_info["id"]
    served_model(edge, name)
    entry = _anthropic if is_anthropic(request) else _openai
    return json_response(entry(edge, name))


def _openai(edge: Edge, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(edge.started_at),
        "owned_by": "omlx",
        "max_model_len": edge.max_context,
    }


def _anthropic(edge: Edge, name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": edge.model.id,
        "created_at": datetime.fromtimestamp(int(edge.started_at), UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": edge.max_context - 1,
        "max_tokens": edge.max_context - 1,
    }
