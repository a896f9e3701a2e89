"""Who may ask for what: hosts, keys, and where a state-changing request may come from."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import SecretStr

from omlx.settings import Settings, is_loopback
from omlx.web.edge import EDGE
from omlx.web.errors import ApiError, Handler

COOKIE = "omlx_admin"
OPEN_ROUTES = frozenset({"/health", "/admin/login"})
"""Answered without a key, with everything under /static/."""

ADMIN_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""With every answer below /admin; a page adds its policy (``pages``)."""

# Cookies are signed with this: a restart ends every session, and no key is ever in a cookie.
_SECRET = secrets.token_bytes(32)


def cookie_value(key: str) -> str:
    """What a browser that logged in with ``key`` holds."""
    return hmac.new(_SECRET, key.encode(), hashlib.sha256).hexdigest()


def same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())


def is_admin(path: str) -> bool:
    return path == "/admin" or path.startswith("/admin/")


def is_page(path: str) -> bool:
    """Whether a person looks at it, as opposed to a script of ours."""
    return is_admin(path) and not path.startswith(("/admin/api/", "/admin/events"))


def admin_key(settings: Settings) -> str | None:
    """The key that opens /admin: its own, or the API's when it has none."""
    return _plain(settings.admin_key) or _plain(settings.api_key)


@web.middleware
async def host_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse foreign names: a page elsewhere must not reach us by pointing its name here."""
    settings = request.app[EDGE].loaded.settings
    name = _host_name(f"//{request.host}")
    bound = settings.host.lower()
    if not (is_loopback(name) or name == bound or name in settings.allowed_hosts):
        raise ApiError(
            403,
            "The Host of this request is not served here; list it in allowed_hosts.",
            kind="permission_error",
            code="host_not_allowed",
        )
    return await handler(request)


@web.middleware
async def key_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    settings = request.app[EDGE].loaded.settings
    path = request.path
    if path in OPEN_ROUTES or path.startswith("/static/"):
        return await handler(request)
    wanted = admin_key(settings) if is_admin(path) else _plain(settings.api_key)
    if wanted is None:
        return await handler(request)
    if not _has_key(request, wanted):
        if request.method == "GET" and is_page(path):
            raise web.HTTPSeeOther("/admin/login")
        raise ApiError(
            401,
            "A valid API key is required, as Authorization: Bearer or x-api-key.",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return await handler(request)


@web.middleware
async def origin_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """State-changing admin requests come from our own pages, as JSON."""
    if is_admin(request.path) and request.method not in ("GET", "HEAD", "OPTIONS"):
        origin = request.headers.get("Origin")
        site = request.headers.get("Sec-Fetch-Site", "none")
        foreign = origin is not None and origin.partition("://")[2].lower() != request.host.lower()
        if foreign or site not in ("none", "same-origin"):
            raise ApiError(
                403,
                "This request comes from another site.",
                kind="permission_error",
                code="foreign_origin",
            )
        if request.content_type != "application/json":
            raise ApiError(415, "Send the body as application/json.", code="unsupported_media_type")
    return await handler(request)


async def add_admin_headers(request: web.Request, response: web.StreamResponse) -> None:
    """A signal handler, so that refusals and streams of the administration have them as well."""
    if is_admin(request.path):
        for name, value in ADMIN_HEADERS.items():
            response.headers.setdefault(name, value)


def _host_name(url: str) -> str:
    """In lower case, without a port; empty when there is none."""
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:  # brackets that hold no address
        return ""


def _plain(key: SecretStr | None) -> str | None:
    return None if key is None else key.get_secret_value()


def _has_key(request: web.Request, wanted: str) -> bool:
    """Every key that is given must be right, and one must be given."""
    given: list[str] = []
    authorization = request.headers.get("Authorization")
    if authorization is not None:
        scheme, _, value = authorization.partition(" ")
        given.append(value.strip() if scheme.lower() == "bearer" else "")
    if "x-api-key" in request.headers:
        given.append(request.headers["x-api-key"])
    if given:
        return all(same(key, wanted) for key in given)
    cookie = request.cookies.get(COOKIE)
    return is_admin(request.path) and cookie is not None and same(cookie, cookie_value(wanted))
