"""A person at the dashboard of a real server sees real requests, and can stop one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.web.live_page import needs_chromium, open_page
from tests.web.serving import chat, loop_for_ever, serving

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="module")]

ModelPath = Callable[[str], Path]
WITHIN_MS = 2000
"""Of a request's end its numbers are on the page."""


async def test_a_real_request_is_on_the_page_within_two_seconds(
    model_path: ModelPath, tmp_path: Path, browser: Browser
) -> None:
    async with serving(model_path("tape"), tmp_path) as server:
        page, complaints = await open_page(browser, f"{server.url}/admin")
        await expect(page.locator("#processed")).to_have_text("0")

        for number in (1, 2):
            told = await server.chat(" alpha beta gamma delta" * 20)
            prompt = told["usage"]["prompt_tokens"]
            await expect(page.locator("#processed")).to_have_text(
                f"{number * prompt:,}", timeout=WITHIN_MS
            )
            await expect(page.locator("#ended tr")).to_have_count(number, timeout=WITHIN_MS)
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        await expect(page.locator("#cached")).to_have_text(f"{cached:,}", timeout=WITHIN_MS)
        await expect(page.locator("#health-text")).to_contain_text("stores and restores")

        assert complaints == []

    assert cached > 0


async def test_the_charts_past_is_there_after_a_reload_and_after_a_restart(
    model_path: ModelPath, tmp_path: Path, browser: Browser
) -> None:
    async def in_the_table(url: str) -> None:
        page, _ = await open_page(browser, f"{url}/admin")
        await page.get_by_role("button", name="View as table").click()
        for res in ("1m", "1h", "10s"):
            await page.locator(f'input[name="res"][value="{res}"]').check()
            await expect(page.locator("#table-rows")).to_contain_text("1,234")
        await page.context.close()

    async with serving(model_path("tape"), tmp_path) as server:
        told = await server.post({"prompt": [40] * 1234, "max_tokens": 1}, "/v1/completions")
        assert told[0] == 200
        await in_the_table(server.url)
        await in_the_table(server.url)

    async with serving(model_path("tape"), tmp_path) as server:
        await in_the_table(server.url)


async def test_a_running_request_shows_its_progress_and_can_be_cancelled(
    model_path: ModelPath, tmp_path: Path, browser: Browser
) -> None:
    async with serving(model_path("tape"), tmp_path) as server:
        page, complaints = await open_page(browser, f"{server.url}/admin")
        server.gate.hold("decode")
        body = chat("on and on " * 30, stream=True, **loop_for_ever())
        async with server.http.post(f"{server.url}/v1/chat/completions", json=body) as stream:
            name = stream.headers["x-request-id"]
            await server.gate.reached()
            row = page.locator(f'#running tr[data-id="{name}"]')
            await expect(row).to_contain_text("prefill", timeout=WITHIN_MS)
            await expect(row).to_contain_text("computed")

            await row.get_by_role("button").click()
            server.gate.open()
            rest = await stream.text()
        await expect(page.locator("#running-empty")).to_be_visible(timeout=WITHIN_MS)
        await expect(page.locator("#ended tr").first).to_contain_text("cancelled")
        assert complaints == []

    assert '"code":"cancelled"' in rest
