"""A running server's admin API, as the tools use it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from omlx.tools.dialogue import Refused

ANSWER_S = 30.0
"""How long a server may take for what it knows already."""

_MESSAGE_MAX = 300


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key is sent to the server that was named and to no other."""

    def http_error_302(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any) -> None:
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class CacheServer:
    def __init__(self, url: str, key: str | None) -> None:
        """Raises Refused for what is no http URL."""
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            usable = False
        if not usable:
            raise Refused("--url wants the address of a server: http://127.0.0.1:8000")
        self._url = url.rstrip("/")
        self._key = key
        # No proxy: a server of ours is near, and its key is nobody else's business.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def get(self, path: str) -> dict[str, Any]:
        return self._ask(path, None, ANSWER_S)

    def post(
        self, path: str, body: dict[str, Any], timeout_s: float | None = ANSWER_S
    ) -> dict[str, Any]:
        """Raises Refused."""
        return self._ask(path, json.dumps(body).encode(), timeout_s)

    def _ask(self, path: str, body: bytes | None, timeout_s: float | None) -> dict[str, Any]:
        request = urllib.request.Request(f"{self._url}/admin/api/{path}", body)
        if body is not None:
            request.add_header("Content-Type", "application/json")
        if self._key is not None:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as refusal:
            raise Refused(self._refusal(refusal)) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise Refused(f"{self._url} can't be reached: {_line(str(reason))}") from None
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Refused(f"{self._url} did not answer as an omlx server does")
        return found

    def _refusal(self, refusal: urllib.error.HTTPError) -> str:
        if refusal.code == 401:
            return (
                f"{self._url} wants a key, and not this one: set OMLX_ADMIN_KEY, or OMLX_API_KEY "
                "where that opens /admin too"
            )
        try:
            with refusal:
                message = json.load(refusal)["error"]["message"]
        except (OSError, ValueError, KeyError, TypeError, HTTPException):
            message = "no reason given"
        return f"{self._url} refused with {refusal.code}: {_line(str(message))}"


def _line(text: str) -> str:
    """What somebody else wrote, on one printable line."""
    text = " ".join(text.split())[:_MESSAGE_MAX]
    return text if text.isprintable() else ascii(text)
