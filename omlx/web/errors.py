"""Every error a client can get, in the shape of its dialect.

OpenAI's has always message, type, param and code. Anthropic's type follows from the status.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from omlx.actors.scheduler import GenerationFailed, TooLarge, TooManyRequests
from omlx.actors.tokenizer import PromptRejected
from omlx.kernel.message import ActorGone, MailboxFull
from omlx.web.ids import request_id

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_ANTHROPIC_PATH = re.compile(r"(/v1)?/messages(/.*)?")
_BOTH_PATH = re.compile(r"(/v1)?/models(/.*)?")

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; of the others those from 500 on are api_error, the rest invalid_request_error."""


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

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        rest = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = ANTHROPIC_TYPES.get(self.status, rest)
        error = {"type": kind, "message": self.anthropic_message()}
        return {"type": "error", "error": error, "request_id": request_id}

    def anthropic_message(self) -> str:
        return str(self)


class ContextTooLong(ApiError):
    """Clients of either dialect look for its words to shorten a conversation."""

    def __init__(self, num_tokens: int, max_context: int, param: str) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {max_context} tokens. However, your {param} "
            f"takes {num_tokens} tokens, which leaves no room for an answer.",
            param=param,
            code="context_length_exceeded",
        )
        self._tokens, self._maximum = num_tokens, max_context - 1

    def anthropic_message(self) -> str:
        return f"prompt is too long: {self._tokens} tokens > {self._maximum} maximum"


def is_anthropic(request: web.Request) -> bool:
    """Whether the client speaks Anthropic's dialect. One path is asked by clients of both."""
    if _BOTH_PATH.fullmatch(request.path):
        return "anthropic-version" in request.headers
    return _ANTHROPIC_PATH.fullmatch(request.path) is not None


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
        case TooLarge():
            # As a context that is too long: what helps is a shorter conversation.
            return ApiError(400, f"{error}.", code="context_length_exceeded")
        case PromptRejected():
            return invalid(f"The messages can't be rendered: {error}.", "messages")
        case GenerationFailed(code="cancelled"):
            # gRPC's number for it. Clients take a 409 or a 5xx for a wish to be asked again.
            return ApiError(499, "The request was cancelled on the server.", code="cancelled")
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
        body = answer.body()
        if is_anthropic(request):
            body = answer.anthropic_body(request_id(request))
        return json_response(body, answer.status, answer.headers)
