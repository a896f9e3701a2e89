"""A real browser before a real server: one of each for a module of tests."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from omlx.web.auth import COOKIE, cookie_value
from omlx.web.i18n import LANGUAGE_COOKIE
from tests.web.serving import Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_MS = 20_000.0
"""What a browser and a server on two busy cores may take; nobody waits so long for what holds."""

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
ADMIN_KEY = "sk-admin-for-browsers"
API_KEY = "sk-api-for-programs"

TELL_VIOLATIONS = (
    "addEventListener('securitypolicyviolation',"
    " (e) => console.error('CSP ' + e.violatedDirective + ' ' + e.blockedURI));"
)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        await browser.close()


@dataclass
class Visit:
    """A page that somebody who is logged in looks at, and what came of it."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of scripts, and what the policy forbade."""
    hosts: set[str] = field(default_factory=set)
    """Whom the page asked for anything."""

    def hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    async def show(self, server: Server, path: str) -> None:
        await self.page.goto(f"{server.url}{path}")


@asynccontextmanager
async def visiting(
    browser: Browser,
    server: Server,
    *,
    language: str = "en",
    theme: Literal["light", "dark"] = "light",
    width: int = 1280,
    scripts: tuple[str, ...] = (),
) -> AsyncIterator[Visit]:
    """Somebody who is logged in, in an empty window. ``scripts`` run before those of each page."""
    options: dict[str, Any] = {"viewport": {"width": width, "height": 844}}
    context = await browser.new_context(color_scheme=theme, **options)
    cookie: dict[str, Any] = {"name": COOKIE, "value": cookie_value(ADMIN_KEY)}
    chosen: dict[str, Any] = {"name": LANGUAGE_COOKIE, "value": language}
    await context.add_cookies(
        [{**cookie, "url": f"{server.url}/admin"}, {**chosen, "url": server.url}]  # type: ignore[arg-type]
    )
    for script in (TELL_VIOLATIONS, *scripts):
        await context.add_init_script(script)
    page = await context.new_page()
    visit = Visit(page)
    page.on("console", visit.hear)
    page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    page.on("request", lambda request: visit.hosts.add(urlsplit(request.url).netloc))
    try:
        yield visit
    finally:
        await context.close()
