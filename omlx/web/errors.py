"""Every error a client can get, in OpenAI's shape: always message, type, param and code."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from omlx.actors.scheduler import GenerationFailed, TooManyRequests
from omlx.actors.tokenizer import PromptRejected
from omlx.kernel.message import ActorGone, MailboxFull

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiError(Exception):
    """A refusal with everything its answer needs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def loading() -> ApiError:
    return ApiError(
        503,
        "The model is still loading; try again in a moment.",
        kind="server_error",
        code="model_loading",
        headers={"Retry-After": "2"},
    )


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "The server is shutting down.",
        kind="server_error",
        code="server_shutdown",
        headers={"Retry-After": "5", "Connection": "close"},
    )


def from_exception(error: Exception) -> ApiError:
    """The answer to an exception that a handler let through."""
    match error:
        case ApiError():
            return error
        case TooManyRequests() | MailboxFull():
            return ApiError(
                429,
                f"The server is busy: {error}.",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        case PromptRejected():
            return invalid(f"The messages can't be rendered: {error}.", "messages")
        case GenerationFailed():
            passing = error.code != "engine_error"  # a restart or the end of the server
            return ApiError(
                503 if passing else 500,
                f"The request could not be finished: {error}.",
                kind="server_error",
                code=error.code,
                headers={"Retry-After": "1"} if passing else None,
            )
        case ActorGone():
            return ApiError(
                503,
                "The engine is restarting; try again in a moment.",
                kind="server_error",
                code="engine_restarting",
                headers={"Retry-After": "1"},
            )
        case web.RequestPayloadError():
            return invalid("The body is not what its headers say it is.", None, "invalid_body")
        case ConnectionError():
            return invalid("The client has gone.", None, "client_gone")
        case web.HTTPRequestEntityTooLarge():
            return ApiError(
                413,
                "The request body is larger than body_max_size allows.",
                code="request_too_large",
            )
        case web.HTTPNotFound():
            return ApiError(404, "There is no such route.", code="not_found")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return ApiError(
                405,
                f"The route takes {allowed} only.",
                code="method_not_allowed",
                headers={"Allow": allowed},
            )
        case web.HTTPException():
            return ApiError(error.status, error.reason or "The request is not valid.")
    log.error("a handler failed", exc_info=error)
    return ApiError(
        500,
        "The server failed on this request.",
        kind="server_error",
        code="internal_error",
        headers={"x-should-retry": "false"},
    )


def json_response(
    body: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), status=status, content_type="application/json", headers=headers
    )


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into an answer; redirects and finished streams pass."""
    try:
        return await handler(request)
    except (web.HTTPRedirection, web.HTTPSuccessful):
        raise
    except Exception as error:
        answer = from_exception(error)
        return json_response(answer.body(), answer.status, answer.headers)
