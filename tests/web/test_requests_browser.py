"""The log of requests shows where time and tokens went, can be searched, and read by keys."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from omlx.actors.stats_messages import EngineReport, ModelServed, RequestEnded
from omlx.core.diagnosis import Change, Section
from omlx.core.usage import EngineGauges, ModelFacts
from tests.sim.records import record, running_row
from tests.web.live_page import needs_chromium, open_page
from tests.web.stage import Served, dashboard

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="module")]

LONG = "<img src=x onerror=window.hacked=1>" + "x" * 300
SLOW = record(
    id="chatcmpl-slow",
    client="aider/0.90",
    prompt_tokens=1001,
    cached_tokens=0,
    cached_ram=0,
    prefill_ms=4000.0,
    engine_ms=4000.0,
    total_ms=4203.5,
    reuse_reason="no_block",
    reuse_token=0,
    conversation="session-7",
    change=Change("chatcmpl-older", Section.MESSAGES, 400, 900, message=1),
)
WARM = record(
    id="chatcmpl-warm",
    prompt_tokens=1001,
    cached_tokens=960,
    cached_ram=640,
    cached_ssd=320,
    reuse_reason="diverged",
    reuse_token=960,
    total_ms=233.5,
)
GONE = record(
    id="msg_gone",
    route="/v1/messages",
    finish_reason="cancelled",
    prefilled=False,
    ttft_ms=None,
    cached_tokens=0,
    unfinished_tokens=0,
    generated_tokens=0,
    reuse_reason="disabled",
)


@pytest_asyncio.fixture(loop_scope="module")
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with dashboard(tmp_path) as served:
        await served.stats.tell(ModelServed(ModelFacts("demo", 4, 0, 12, 256, "00ff00ff00ff00ff")))
        for one in (SLOW, WARM, GONE):
            await served.stats.tell(RequestEnded(one))
        yield served


async def opened(browser: Browser, served: Served, **options: object) -> tuple[Page, list[str]]:
    page, complaints = await open_page(
        browser, str(served.server.make_url("/admin/requests")), **options
    )
    await expect(page.locator(".entry")).to_have_count(3)
    return page, complaints


async def milliseconds(page: Page) -> tuple[list[float], float]:
    """Of the phases that the open request shows, and of their sum."""
    texts = await page.locator(".phases tr:not(:has(.ghost)) td.num").all_text_contents()
    numbers = [float(re.sub(r"[^\d.]", "", text)) for text in texts]
    return numbers[:-1], numbers[-1]


async def test_the_shown_phases_add_up_to_the_shown_total(served: Served, browser: Browser) -> None:
    page, complaints = await opened(browser, served)

    for name in ("slow", "warm"):
        await page.locator(f'[data-id="chatcmpl-{name}"] .entry').click()
        parts, total = await milliseconds(page)
        await page.locator(f'[data-id="chatcmpl-{name}"] .entry').click()
        assert len(parts) == 5
        await page.locator(f'[data-id="chatcmpl-{name}"] .detail').evaluate("node => node.remove()")
        assert abs(sum(parts) - total) <= 2

    assert complaints == []


async def test_bars_of_one_scale_are_as_long_as_their_time(
    served: Served, browser: Browser
) -> None:
    page, _ = await opened(browser, served)

    async def widths(kind: str) -> dict[str, float]:
        script = (
            "nodes => Object.fromEntries(nodes.map((n) => [n.closest('li').dataset.id,"
            " n.getBoundingClientRect().width / n.parentElement.getBoundingClientRect().width]))"
        )
        return await page.locator(f".fall .{kind}").evaluate_all(script)

    decode, ghost = await widths("decode"), await widths("ghost")

    assert decode["chatcmpl-slow"] == pytest.approx(decode["chatcmpl-warm"], abs=0.01)
    # 960 cached tokens, at 4 ms each, less what finding and restoring them took.
    assert ghost.keys() == {"chatcmpl-warm"}
    scale = 4203.5
    assert ghost["chatcmpl-warm"] == pytest.approx((233.5 + 3840 - 2.5) / scale, abs=0.01)
    await page.get_by_label("Own scale").check()
    assert (await widths("ghost"))["chatcmpl-warm"] == pytest.approx(1.0, abs=0.01)


async def test_a_request_tells_where_its_tokens_came_from_and_why_reuse_ended(
    served: Served, browser: Browser
) -> None:
    page, _ = await opened(browser, served)

    await page.locator('[data-id="chatcmpl-warm"] .entry').click()
    warm = page.locator('[data-id="chatcmpl-warm"] .detail')
    await expect(warm).to_contain_text("640 from RAM")
    await expect(warm).to_contain_text("320 from SSD")
    await expect(warm).to_contain_text("41 computed")
    await expect(warm).to_contain_text("reuse ended at token 960; 41 tokens after it")
    await expect(warm).to_contain_text("The cache saved 3.8s.")
    await page.locator('[data-id="msg_gone"] .entry').click()
    await expect(page.locator('[data-id="msg_gone"]')).to_contain_text(
        "before anything was computed"
    )
    await page.locator('[data-id="chatcmpl-slow"] .entry').click()
    slow = page.locator('[data-id="chatcmpl-slow"]')
    await expect(slow).to_contain_text("Nothing was reused.")
    await expect(slow).to_contain_text(
        "Turn 2 reads differently than in chatcmpl-older: 500 more tokens would have been found."
    )
    await expect(slow).to_contain_text("session-7")


async def test_a_filter_leaves_what_fits_and_says_so(served: Served, browser: Browser) -> None:
    page, _ = await opened(browser, served)
    shown = page.locator("#log > li:not([hidden])")

    await page.get_by_label("Filter requests").fill("AIDER completions")
    await expect(shown).to_have_count(1)
    await expect(page.locator("#summary")).to_contain_text("1 request, 1,001 prompt tokens, 0.0%")
    await page.get_by_label("Filter requests").fill("")
    await page.get_by_label("State", exact=True).select_option("cancelled")
    await expect(shown).to_have_count(1)
    await page.get_by_label("State", exact=True).select_option("")
    await page.get_by_label("Why reuse ended").select_option("diverged")
    await expect(shown).to_have_count(1)
    await page.get_by_label("Filter requests").fill("nobody")
    await expect(page.locator("#log-empty")).to_have_text("No request fits the filter.")


async def test_new_requests_come_on_top_and_an_open_one_stays_open(
    served: Served, browser: Browser
) -> None:
    page, _ = await opened(browser, served)
    await page.locator('[data-id="chatcmpl-warm"] .entry').click()

    await served.stats.tell(RequestEnded(record(id="chatcmpl-new", client="new/1")))

    await expect(page.locator("#log > li").first).to_contain_text("new/1")
    await expect(page.locator('[data-id="chatcmpl-warm"] .detail')).to_be_visible()
    await expect(page.locator(".entry")).to_have_count(4)


async def test_the_keyboard_walks_the_list(served: Served, browser: Browser) -> None:
    page, _ = await opened(browser, served)

    await page.keyboard.press("/")
    await expect(page.locator("#filter")).to_be_focused()
    await page.keyboard.press("Tab")
    await page.locator("#main").focus()
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await page.keyboard.press("k")
    await page.keyboard.press("Enter")

    await expect(page.locator("#log > li").nth(1).locator(".detail")).to_be_visible()
    await expect(page.locator(".detail")).to_have_count(1)


async def test_keeping_texts_is_asked_for_shown_everywhere_and_undone(
    served: Served, browser: Browser
) -> None:
    page, complaints = await opened(browser, served)
    banner = "Texts of prompts and answers are being kept"

    await page.get_by_role("button", name="Keep texts").click()
    await expect(page.get_by_role("dialog")).to_contain_text("Nothing is written to disk")
    await page.get_by_role("dialog").get_by_role("button", name="Keep texts").click()
    await expect(page.locator("#capture-note")).to_contain_text(banner)
    served.captures.begin("chatcmpl-texted", "the prompt <b>").add(0, "the answer")  # type: ignore[union-attr]
    await served.stats.tell(RequestEnded(record(id="chatcmpl-texted")))
    await page.locator('[data-id="chatcmpl-texted"] .entry').click()
    await expect(page.locator('[data-id="chatcmpl-texted"] pre')).to_have_text(
        ["the prompt <b>", "the answer"]
    )
    await page.goto(str(served.server.make_url("/admin")))
    await expect(page.locator("#capture-note")).to_contain_text(banner)
    await page.goto(str(served.server.make_url("/admin/requests")))
    await page.get_by_role("button", name="Stop and forget texts").click()

    await expect(page.locator("#capture-note")).to_be_hidden()
    assert (served.captures.on, served.captures.ids()) == (False, [])
    assert complaints == []


@pytest.mark.parametrize("width", [390, 820, 1000, 1280])
async def test_nothing_scrolls_sideways_and_names_stay_text(
    served: Served, browser: Browser, width: int
) -> None:
    page, complaints = await opened(browser, served, viewport={"width": width, "height": 844})
    rows = tuple(running_row(id=f"{n}{LONG}", client=LONG, state="prefill") for n in range(2))
    await served.stats.tell(EngineReport(EngineGauges(2, 0), rows))
    await served.stats.tell(
        RequestEnded(record(id=LONG, prompt_tokens=10**12, client=LONG, model=LONG, error=LONG))
    )
    await expect(page.locator("#running tr")).to_have_count(2)
    await page.locator(".entry").first.click()
    await expect(page.locator(".detail")).to_contain_text("<img src=x")

    inner, scroll = await page.evaluate("[innerWidth, document.documentElement.scrollWidth]")

    assert scroll <= inner
    assert await page.locator("main script, main img").count() == 0
    assert await page.evaluate("window.hacked") is None
    assert complaints == []
