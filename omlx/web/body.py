"""The body of a request to a checked model, or to an error that names the field.

null means absent. Unknown fields are ignored, and listed in a header of the answer. A field that
asks for something is done, or refused by its name; it is never accepted and ignored.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from omlx.web.errors import ApiError, Handler, invalid

IGNORED_NAMES_MAX = 32
"""Of a body with more unknown fields the first ones are told."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _whole(value: object) -> object:
    """Some clients write whole numbers as 1.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Count = Annotated[int, BeforeValidator(_whole)]


class Loose(BaseModel):
    """What a dialect sends. Of a field that is not listed only the name is kept."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


M = TypeVar("M", bound=Loose)


@web.middleware
async def length_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a body that says it is too long before any of it is read or waited for."""
    length, limit = request.content_length or 0, request.client_max_size
    if length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, length)
    return await handler(request)


def parse(model: type[M], body: bytes) -> M:
    """Raises ApiError, naming the field."""
    try:
        return _validated(model, orjson.loads(body))
    except orjson.JSONDecodeError as error:
        lenient = _lenient(body)
        if lenient is not None:
            _validated(model, lenient)  # a number that is not finite has a field to be named
        raise invalid(f"The body is not valid JSON: {error}.", None, "invalid_json") from None


def ignored_fields(request: Loose, *others: str, strict: bool = False) -> str:
    """Names of the fields that were sent and mean nothing here, as a header's value.

    ``others``: such fields that are listed in a model. ``strict``: raises ApiError for any.
    """
    extra = request.model_extra or {}
    names = [*(name for name, value in extra.items() if value is not None), *others]
    if strict and names:
        name = names[0][:64]
        raise invalid(
            f"{name!r} means nothing here, and strict_requests is on.", name, "unknown_field"
        )
    return ",".join([name for name in names if _PLAIN_NAME.fullmatch(name)][:IGNORED_NAMES_MAX])


def unsupported(what: str, field: str) -> ApiError:
    return invalid(f"{what} not supported.", field, "unsupported_value")


def _lenient(body: bytes) -> object:
    """The body with NaN and infinities let through; None when it is no JSON even then."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _validated(model: type[M], value: object) -> M:
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.", None, "invalid_json")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False), value) from None


def _refusal(errors: list[ErrorDetails], body: dict[str, Any]) -> ApiError:
    # Of a union's branches the one about a part's type says most.
    for error in errors:
        where, given = error["loc"], error["input"]
        if error["type"].startswith("union_tag") and isinstance(given, dict):
            return _unknown_type(given.get("type"), _path_of(where, body))
        if error["type"] == "literal_error" and where[-1] == "type":
            return _unknown_type(given, _path_of(where[:-1], body))
    # Else the one that got furthest is the one that was meant.
    error = max(errors, key=lambda one: len(one["loc"]))
    path = _path_of(error["loc"], body)
    if len(error["loc"]) == 1 and (error["type"] == "missing" or error["input"] is None):
        return invalid(f"{path} is required.", path, "missing_field")
    return invalid(
        f"{path or 'The body'}: {error['msg'].removeprefix('Value error, ')}.", path or None
    )


def _unknown_type(kind: object, path: str) -> ApiError:
    return unsupported(f"{path} of type {str(kind)[:60]!r} is", f"{path}.type")


def _path_of(location: tuple[int | str, ...], value: Any) -> str:
    """``("messages", 0, "content")`` -> ``messages[0].content``, as clients write it.

    What is no key of the value at its place is the name of a union's branch, and left out.
    """
    path = ""
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if isinstance(part, int):
            path += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif part.isidentifier() and isinstance(value, dict) and (part in value or last):
            if part not in value and part == "str":
                continue
            path += f".{part}" if path else part
            value = value.get(part)
    return path
