"""The admin pages as HTML: a template each, rendered once a language.

A page holds no numbers and nothing that a client sent: it fetches what it shows as JSON, and
scripts put it in as text. So its HTML never changes, and no request has to read a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import jinja2
from aiohttp import web

from omlx.resources import resource_dir
from omlx.web.i18n import LANGUAGES, Texts, language_of, load_texts

PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class NavItem:
    href: str
    page: str
    """``common.nav.<page>`` is its label."""


NAV = (
    NavItem("/admin", "overview"),
    NavItem("/admin/requests", "requests"),
    NavItem("/admin/cache", "cache"),
    NavItem("/admin/settings", "settings"),
    NavItem("/admin/chat", "chat"),
    NavItem("/admin/connect", "connect"),
)


def add_page(app: web.Application, path: str, page: str, nav: tuple[NavItem, ...] = NAV) -> None:
    """Serve ``templates/<page>.html`` at ``path``; its texts are ``<page>.*`` and ``common.*``.

    ``<page>.title`` is the title of the window.
    """
    html = {language: _render(page, path, nav, language) for language in LANGUAGES}

    async def show(request: web.Request) -> web.StreamResponse:
        language = language_of(request)
        headers = {**PAGE_HEADERS, "Content-Language": language}
        return web.Response(text=html[language], content_type="text/html", headers=headers)

    app.router.add_get(path, show)


def _render(page: str, path: str, nav: tuple[NavItem, ...], language: str) -> str:
    return (
        _templates()
        .get_template(f"{page}.html")
        .render(
            t=_texts()[language],
            page=page,
            path=path,
            nav=nav,
            language=language,
            languages=LANGUAGES,
        )
    )


@cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(resource_dir("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )


@cache
def _texts() -> dict[str, Texts]:
    return load_texts(resource_dir("static") / "i18n")
