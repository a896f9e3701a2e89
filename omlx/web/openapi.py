"""/openapi.json: what can be asked, said by the models that check the requests.

Behind the API's key, like everything it describes. The aliases without ``/v1`` and the
administration, which is for our own pages, are left out. Answers are described by the keys that
they always have, errors in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from aiohttp import web
from pydantic.json_schema import models_json_schema

from omlx import __version__
from omlx.web.body import Loose
from omlx.web.chat_schema import ChatRequest
from omlx.web.completions import CompletionRequest
from omlx.web.errors import ANTHROPIC_TYPES, json_response
from omlx.web.messages_schema import CountRequest, MessagesRequest
from omlx.web.prompts import DetokenizeRequest, TemplateRequest, TokenizeRequest
from omlx.web.responses_schema import ResponsesRequest

Json = dict[str, Any]

BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
"""JSON Schema's names. Pydantic leaves its own where a number is looked at before it is checked."""

OPENAI = {"$ref": "#/components/schemas/OpenAIError"}
ANTHROPIC = {"$ref": "#/components/schemas/AnthropicError"}


@dataclass(frozen=True, slots=True)
class Operation:
    summary: str
    answer: tuple[str, ...] = ()
    """Keys that the JSON of an answer always has. None: it is a text."""
    asks: type[Loose] | None = None
    """Checks the body."""
    streams: bool = False
    """It answers with events when ``stream`` is true."""
    errors: tuple[Json, ...] = (OPENAI,)
    is_open: bool = False
    """Answered without a key."""


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "OpenAI's chat completions",
        ("id", "object", "created", "model", "choices", "usage"),
        ChatRequest,
        streams=True,
    ),
    ("POST", "/v1/completions"): Operation(
        "OpenAI's text completions",
        ("id", "object", "created", "model", "choices", "usage"),
        CompletionRequest,
        streams=True,
    ),
    ("POST", "/v1/responses"): Operation(
        "OpenAI's responses, stateless",
        ("id", "object", "created_at", "model", "status", "output", "usage"),
        ResponsesRequest,
        streams=True,
    ),
    ("POST", "/v1/messages"): Operation(
        "Anthropic's messages",
        ("id", "type", "role", "model", "content", "stop_reason", "usage"),
        MessagesRequest,
        streams=True,
        errors=(ANTHROPIC,),
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "How many tokens a prompt takes", ("input_tokens",), CountRequest, errors=(ANTHROPIC,)
    ),
    ("GET", "/v1/models"): Operation(
        "The models, in the shape of the client that asks", ("data",), errors=(OPENAI, ANTHROPIC)
    ),
    ("GET", "/v1/models/{id}"): Operation("One model", ("id",), errors=(OPENAI, ANTHROPIC)),
    ("POST", "/tokenize"): Operation("Text to token ids", ("tokens",), TokenizeRequest),
    ("POST", "/detokenize"): Operation("Token ids to text", ("content",), DetokenizeRequest),
    ("POST", "/apply-template"): Operation(
        "The prompt of a chat, as text and as token ids", ("prompt", "tokens"), TemplateRequest
    ),
    ("GET", "/metrics"): Operation("Every number of the dashboard, for Prometheus"),
    ("GET", "/health"): Operation("Alive, and making progress", ("status",), is_open=True),
    ("GET", "/openapi.json"): Operation("This description", ("openapi", "paths")),
}


def add_openapi(app: web.Application) -> None:
    app.router.add_get("/openapi.json", show)


async def show(request: web.Request) -> web.Response:
    return json_response(document())


@cache
def document() -> Json:
    """OpenAPI 3.1, whose schemas are JSON Schema as pydantic writes it."""
    models = dict.fromkeys(one.asks for one in OPERATIONS.values() if one.asks is not None)
    names, schemas = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Json] = {}
    for (method, path), operation in OPERATIONS.items():
        asks = operation.asks
        body = None if asks is None else names[asks, "validation"]
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "omlx", "version": __version__},
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": {**_spelled(schemas["$defs"]), **_errors()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, operation: Operation, body: Json | None) -> Json:
    content: Json = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer:
        whole = {"type": "object", "required": list(operation.answer)}
        content = {"application/json": {"schema": whole}}
    if operation.streams:
        content["text/event-stream"] = {}
    errors = operation.errors
    refusal = errors[0] if len(errors) == 1 else {"anyOf": list(errors)}
    if operation.is_open:  # a supervisor asks, who speaks no dialect
        refusal = {"anyOf": [{"type": "object", "required": ["status"]}, refusal]}
    described: Json = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {
                "description": "A refusal or a failure",
                "content": {"application/json": {"schema": refusal}},
            },
        },
    }
    if body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    if "{id}" in path:
        schema = {"type": "string", "minLength": 1}
        described["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": schema}]
    if operation.is_open:
        described["security"] = []
    return described


def _spelled(node: Any) -> Any:
    """With every bound under the name that JSON Schema has for it."""
    if isinstance(node, list):
        return [_spelled(one) for one in node]
    if not isinstance(node, dict):
        return node
    names = BOUNDS if node.get("type") == "integer" else {}
    return {names.get(name, name): _spelled(value) for name, value in node.items()}


def _errors() -> Json:
    """What ``errors`` answers with, in either dialect."""
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}
    openai = {"message": text, "type": text, "param": maybe, "code": maybe}
    kinds = [*ANTHROPIC_TYPES.values(), "api_error"]
    anthropic = {"type": {"enum": kinds}, "message": text}
    return {
        "OpenAIError": _exactly(error=_exactly(**openai)),
        "AnthropicError": _exactly(
            type={"const": "error"}, error=_exactly(**anthropic), request_id=text
        ),
    }


def _exactly(**properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
