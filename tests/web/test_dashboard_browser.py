"""In a real browser the dashboard is live, quiet, safe, and fits a telephone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from omlx.actors.stats_messages import CacheReport, EngineReport, ModelServed, RequestEnded
from omlx.core.usage import CacheGauges, EngineGauges, ModelFacts
from tests.sim.records import record, running_row
from tests.web.live_page import needs_chromium
from tests.web.live_page import open_page as open_url
from tests.web.stage import Served, dashboard

LONG = "<img src=x onerror=window.hacked=1>" + "x" * 300

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module")
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with dashboard(tmp_path) as served:
        await served.stats.tell(ModelServed(ModelFacts("demo", 4, 0, 12, 256, "00ff00ff00ff00ff")))
        await served.stats.tell(
            CacheReport(
                CacheGauges(
                    hot_bytes=750,
                    hot_limit_bytes=1000,
                    ssd_bytes=3000,
                    ssd_limit_bytes=2000,
                    pending_bytes=90,
                    pending_limit_bytes=100,
                    tier_state="ok",
                )
            )
        )
        await served.stats.tell(RequestEnded(record(id="req-first", cached_tokens=0)))
        yield served


async def open_page(browser: Browser, served: Served, **options: object) -> tuple[Page, list[str]]:
    return await open_url(browser, str(served.server.make_url("/admin")), **options)


async def test_numbers_change_with_a_record_and_nothing_complains(
    served: Served, browser: Browser
) -> None:
    page, complaints = await open_page(browser, served)
    await expect(page.locator("#processed")).to_have_text("100")
    await expect(page.locator("#efficiency")).to_have_text("0.0%")
    await expect(page.locator("#chart canvas")).to_be_visible()
    await expect(page.locator("#chart-empty")).to_be_hidden()

    await served.stats.tell(RequestEnded(record(id="req-second", cached_tokens=96)))

    await expect(page.locator("#processed")).to_have_text("200")
    await expect(page.locator("#cached")).to_have_text("96")
    await expect(page.locator("#efficiency")).to_have_text("48.0%")
    await expect(page.locator("#ended tr")).to_have_count(2)
    await expect(page.locator("#ended tr").first).to_contain_text("second")
    for scope in ("1h", "24h", "alltime"):
        await page.locator(f'input[name="scope"][value="{scope}"]').check()
        await expect(page.locator("#processed")).to_have_text("200")
    await page.get_by_role("button", name="View as table").click()
    await expect(page.locator("#table-rows")).to_contain_text("96")
    for res in ("10s", "1m", "1h", "1s"):
        await page.locator(f'input[name="res"][value="{res}"]').check()
        await expect(page.locator("#chart canvas")).to_be_visible()
    await page.get_by_role("button", name="Colours: Auto").click()
    await expect(page.locator("html")).to_have_attribute("data-theme", "light")
    assert complaints == []


async def test_no_bar_is_fuller_than_full(served: Served, browser: Browser) -> None:
    page, _ = await open_page(browser, served)

    meters = page.get_by_role("meter")
    await expect(page.locator(".tier-share")).to_have_text(["75.0%", "100.0%", "90.0%", "–"])
    assert await meters.count() == 4
    for meter in await meters.all():
        assert 0 <= float(await meter.get_attribute("aria-valuenow") or "nan") <= 100
    await expect(page.locator("#tiers .tier").nth(2)).to_have_attribute("data-level", "warn")


async def test_names_of_clients_stay_text(served: Served, browser: Browser) -> None:
    page, complaints = await open_page(browser, served)

    await served.stats.tell(ModelServed(ModelFacts(id=LONG)))
    await served.stats.tell(
        EngineReport(EngineGauges(running=1), (running_row(client=LONG, id=LONG),))
    )
    await served.stats.tell(
        RequestEnded(record(client="<script>window.hacked=1</script>", error=LONG))
    )

    await expect(page.locator("#ended tr").first).to_contain_text(
        "<script>window.hacked=1</script>"
    )
    await expect(page.locator("#running")).to_contain_text("<img src=x")
    await expect(page.locator("#model")).to_contain_text("<img src=x")
    assert await page.locator("main script, main img").count() == 0
    assert await page.evaluate("window.hacked") is None
    assert complaints == []


@pytest.mark.parametrize("width", [390, 820, 900, 1280])
async def test_nothing_scrolls_sideways(served: Served, browser: Browser, width: int) -> None:
    await served.stats.tell(ModelServed(ModelFacts(LONG, 400, 400, 400, 4096, "f" * 64)))
    rows = tuple(running_row(id=f"{n}{LONG}", client=LONG, state="prefill") for n in range(3))
    page, _ = await open_page(browser, served, viewport={"width": width, "height": 844})
    await served.stats.tell(EngineReport(EngineGauges(8, 64, 0.0, 123_456.0, 9_999.0), rows))
    await served.stats.tell(RequestEnded(record(prompt_tokens=10**12, client=LONG, error=LONG)))
    await expect(page.locator("#running tr")).to_have_count(3)
    await page.get_by_role("button", name="View as table").click()

    inner, scroll = await page.evaluate("[innerWidth, document.documentElement.scrollWidth]")

    assert scroll <= inner


async def test_a_lost_connection_is_said_and_mends(served: Served, browser: Browser) -> None:
    page, _ = await open_page(browser, served)
    await expect(page.locator("#banner")).to_be_hidden()

    await page.context.set_offline(True)
    served.actor[-1]._feeds.end()

    await expect(page.locator("#banner")).to_contain_text("connection to the server is lost")
    await page.context.set_offline(False)
    await expect(page.locator("#banner")).to_be_hidden(timeout=15_000)
    await expect(page.locator("#link-text")).to_have_text("Live")


async def test_a_hidden_tab_listens_no_more_until_it_shows_again(
    served: Served, browser: Browser
) -> None:
    page, _ = await open_page(browser, served)
    hide = (
        "(hidden) => { Object.defineProperty(document, 'hidden',"
        " { value: hidden, configurable: true });"
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )

    await page.evaluate(hide, True)
    await expect(page.locator("#link-text")).to_have_text("Paused")
    await served.stats.tell(RequestEnded(record(id="req-unseen", cached_tokens=96)))
    await page.wait_for_timeout(1500)
    await expect(page.locator("#processed")).to_have_text("100")
    await page.evaluate(hide, False)

    await expect(page.locator("#processed")).to_have_text("200")
    await expect(page.locator("#ended tr").first).to_contain_text("unseen")


async def test_the_keyboard_reaches_everything(served: Served, browser: Browser) -> None:
    page, _ = await open_page(browser, served)

    reached: list[str] = []
    for _ in range(13):
        await page.keyboard.press("Tab")
        reached.append(
            await page.evaluate(
                "document.activeElement.name || document.activeElement.textContent.trim()"
            )
        )

    assert reached == [
        *("Skip to content", "omlx"),
        *("Overview", "Requests", "Cache", "Settings", "Chat", "Connect"),
        *("language", "Auto", "scope", "res", "View as table"),
    ]
