"""Every page of the administration, in both languages and both themes: open to everybody, quiet,
at home, and no wider than a telephone. A new page is one line in PAGES.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from omlx.web.i18n import LANGUAGES
from omlx.web.pages import NAV
from tests.web.browsing import ADMIN_KEY, API_KEY, CHROMIUM, Visit, chromium, visiting
from tests.web.serving import Server, chat, serving

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]

AXE = Path(__file__).resolve().parents[1] / "vendor" / "axe-core" / "axe.min.js"
AXE_RUN = """async () => {
  const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
  const found = await axe.run(document, { runOnly: tags, resultTypes: ["violations"] });
  return found.violations.flatMap(({ id, nodes }) =>
    nodes.map((node) => `${id}: ${node.html} ${node.failureSummary}`));
}"""

PHONE = 390


async def _nothing(page: Page) -> None:
    """It shows everything by itself."""


async def _send(page: Page) -> None:
    await page.locator("#max-tokens").fill("4")
    await page.locator("#text").fill("Hello")
    await page.locator("#text").press("Enter")
    await expect(page.locator(".try")).to_be_visible()


async def _open_the_first(page: Page) -> None:
    await page.locator(".entry").first.click()
    await expect(page.locator(".detail")).to_be_visible()


async def _change_and_compare(page: Page) -> None:
    await page.locator("[name=gdn_sidecar_state_dtype]").select_option("int8")
    await page.locator("[name=hot_cache_max_size]").fill("much")
    await page.locator("[aria-invalid=true]").wait_for()
    await page.locator(".codecs button").click()
    await expect(page.locator(".codecs tbody tr")).to_have_count(5)


async def _select_and_list(page: Page) -> None:
    await page.locator("#tree").press("ArrowRight")
    await page.locator("#list-button").click()
    await page.locator("#probe-text").fill("Hello")
    await page.locator("#probe button").click()
    await expect(page.locator("#probe-found .bar")).to_be_visible()


@dataclass(frozen=True)
class Shown:
    path: str
    there: str
    """Visible once the page has built itself."""
    act: Callable[[Page], Awaitable[None]] = field(default=_nothing)
    """Brings everything into sight."""


PAGES = (
    Shown("/admin/login", "#key"),
    Shown("/admin", "#ended tr"),
    Shown("/admin/requests", ".entry", _open_the_first),
    Shown("/admin/cache", "#tree [role=treeitem]", _select_and_list),
    Shown("/admin/settings", ".setting", _change_and_compare),
    Shown("/admin/chat", "#model option", _send),
    Shown("/admin/connect", "#clients [role=tab]"),
)


@pytest.fixture(scope="module", params=PAGES, ids=lambda shown: shown.path)
def shown(request: pytest.FixtureRequest) -> Shown:
    return request.param


# Of the module as well: so all tests of one page in one language come after each other.
@pytest.fixture(scope="module", params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def panel(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    """With two keys, and something in everything that is shown."""
    home = tmp_path_factory.mktemp("home")
    keys: dict[str, Any] = {"api_key": API_KEY, "admin_key": ADMIN_KEY}
    async with serving(model_path("qwen3_5"), home, **keys) as server:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        for text in ("Hello, and a long sentence that fills some blocks.", "Hello, you.", "Hello"):
            status, answer, _ = await server.post(chat(text, max_tokens=3), headers=headers)
            assert status == 200, answer
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def visit(browser: Browser, panel: Server) -> AsyncIterator[Callable[..., Awaitable[Visit]]]:
    """Each page is opened once a language, and looked at from every side."""
    async with (
        visiting(browser, panel, language="en", scripts=(AXE.read_text("utf-8"),)) as en,
        visiting(browser, panel, language="zh", scripts=(AXE.read_text("utf-8"),)) as zh,
    ):
        visits = {"en": en, "zh": zh}
        at: dict[str, str] = {}

        async def open_page(shown: Shown, language: str) -> Visit:
            found = visits[language]
            if at.get(language) != shown.path:
                at[language] = shown.path
                found.complaints.clear()
                found.hosts.clear()
                await found.show(panel, shown.path)
                await expect(found.page.locator(shown.there).first).to_be_attached()
                await shown.act(found.page)
            return found

        yield open_page


async def test_no_page_is_forgotten() -> None:
    assert {item.href for item in NAV} <= {shown.path for shown in PAGES}


async def test_a_page_is_open_to_everybody(
    visit: Callable[..., Awaitable[Visit]], shown: Shown, language: str
) -> None:
    """axe-core finds nothing, in either theme: names, roles, contrast, sizes of targets."""
    page = (await visit(shown, language)).page
    await expect(page.locator("html")).to_have_attribute("lang", language)

    for theme in ("light", "dark"):
        await page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        found: list[str] = await page.evaluate(AXE_RUN)
        assert not found, "\n".join(found)


async def test_a_page_is_quiet_and_asks_nobody_but_us(
    visit: Callable[..., Awaitable[Visit]], panel: Server, shown: Shown, language: str
) -> None:
    found = await visit(shown, language)

    assert found.complaints == []
    assert found.hosts == {f"127.0.0.1:{panel.port}"}


async def test_nothing_scrolls_sideways(
    visit: Callable[..., Awaitable[Visit]], shown: Shown, language: str
) -> None:
    page = (await visit(shown, language)).page
    for width in (PHONE, 820, 1280):
        await page.set_viewport_size({"width": width, "height": 844})
        inner, scroll = await page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
        assert scroll <= inner, width


CONTROLS = """() => {
  const all = document.querySelectorAll(
    "a[href], summary, [tabindex], :is(button, input, select, textarea):enabled");
  const isWanted = (node) => node.tabIndex >= 0 && node.checkVisibility() &&
    (node.type !== "radio" || node.checked);
  return [...all].filter(isWanted).map((node, index) => (node.dataset.nth = index));
}"""
FOCUSED = """() => {
  const node = document.activeElement;
  const rings = [node, node.nextElementSibling, node.parentElement].filter(Boolean);
  const isRinged = rings.some((one) => getComputedStyle(one).outlineStyle !== "none");
  return [Number(node.dataset.nth ?? -1), isRinged, node.outerHTML.slice(0, 120)];
}"""


async def test_the_keyboard_reaches_everything_and_shows_where_it_is(
    visit: Callable[..., Awaitable[Visit]], shown: Shown
) -> None:
    page = (await visit(shown, "en")).page
    wanted = await page.evaluate(CONTROLS)
    await page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    await page.locator(".skip").focus()

    reached = {0}
    for _ in wanted[1:]:
        await page.keyboard.press("Tab")
        number, is_ringed, html = await page.evaluate(FOCUSED)
        assert is_ringed, html
        reached.add(number)

    assert reached == set(wanted)


# ── language and theme ───────────────────────────────────────────────────────────────────────


async def test_the_language_is_the_readers_and_stays(browser: Browser, panel: Server) -> None:
    context = await browser.new_context(locale="zh-CN")
    page = await context.new_page()
    await page.goto(f"{panel.url}/admin/login")
    await expect(page.locator("h1")).to_have_text("登录")

    await page.locator("#language").select_option("en")
    await expect(page.locator("h1")).to_have_text("Sign in")
    await page.reload()

    await expect(page.locator("h1")).to_have_text("Sign in")
    await context.close()


async def test_who_has_the_key_gets_in_and_who_has_not_is_told(
    browser: Browser, panel: Server
) -> None:
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(f"{panel.url}/admin/cache")
    await expect(page.locator("#login-title")).to_be_visible()

    await page.locator("#key").fill(API_KEY)
    await page.locator("#key").press("Enter")
    await expect(page.locator("#login-error")).to_have_text("This key is not valid.")
    await page.locator("#key").fill(ADMIN_KEY)
    await page.locator("#key").press("Enter")

    await page.wait_for_url("**/admin")
    stored: list[dict[str, Any]] = await context.cookies()  # type: ignore[assignment]
    assert ADMIN_KEY not in json.dumps(stored)
    assert "omlx_admin" not in await page.evaluate("document.cookie")
    await context.close()
