"""A page that follows a server's events, and what it complains of."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser, Page, expect

from tests.web.browsing import CHROMIUM, TELL_VIOLATIONS

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


async def open_page(browser: Browser, url: str, **options: object) -> tuple[Page, list[str]]:
    """The page once it is live, and the list that everything it complains of will be in."""
    context = await browser.new_context(**options)  # type: ignore[arg-type]
    page = await context.new_page()
    complaints: list[str] = []
    page.on(
        "console",
        lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.add_init_script(TELL_VIOLATIONS)
    await page.goto(url)
    await expect(page.locator("#link-text")).to_have_text("Live")
    return page, complaints
