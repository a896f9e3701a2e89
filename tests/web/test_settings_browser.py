"""In a real browser a setting is judged at its field, shown before it is saved, confirmed after."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from omlx.settings import NAMES, load_settings
from tests.web.browsing import CHROMIUM, TELL_VIOLATIONS, chromium
from tests.web.serving import Server, serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

LOCKED = {"OMLX_MAX_QUEUED_REQUESTS": "7"}


@asynccontextmanager
async def opened(server: Server, **options: object) -> AsyncIterator[tuple[Page, list[str]]]:
    """The settings, and the list that everything it complains of will be in."""
    async with chromium() as browser:
        context = await browser.new_context(**options)  # type: ignore[arg-type]
        page = await context.new_page()
        complaints: list[str] = []
        page.on(
            "console",
            lambda line: (
                complaints.append(line.text) if line.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.add_init_script(TELL_VIOLATIONS)
        await page.goto(f"{server.url}/admin/settings")
        await expect(page.locator(".setting")).to_have_count(len(NAMES))
        yield page, complaints


@pytest.fixture
async def tape(model_path: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(
        model_path("tape"), tmp_path, variables=LOCKED, in_file=True, gdn_checkpoint_interval=64
    ) as server:
        yield server


def setting(page: Page, name: str):
    return page.locator(f".setting[data-name={name}]")


def stored(home: Path, name: str) -> object:
    return getattr(load_settings({}, {}, home).settings, name)


async def test_what_is_saved_was_shown_before_and_is_confirmed_after(
    tape: Server, tmp_path: Path
) -> None:
    async with opened(tape) as (page, complaints):
        await expect(page.locator("#save-bar")).to_be_hidden()
        await page.locator("[name=hot_cache_max_size]").fill("3MB")
        await page.locator("[name=paged_cache_block_size]").fill("32")
        await page.locator("[name=strip_attribution]").uncheck()
        changes = page.locator("#changes li")
        await expect(changes).to_have_count(3)
        await expect(changes.nth(0)).to_contain_text("20%")
        await expect(changes.nth(0)).to_contain_text("3MB")
        assert str(stored(tmp_path, "hot_cache_max_size")) == "20%"

        await page.get_by_role("button", name="Save").click()

        hot, block = setting(page, "hot_cache_max_size"), setting(page, "paged_cache_block_size")
        await expect(hot.locator(".verdict")).to_contain_text("confirms that it goes by 3MB")
        await expect(hot.locator(".source")).to_have_text("file")
        await expect(block.locator(".verdict")).to_contain_text("Until a restart it is 16")
        await expect(block).to_contain_text("Restart to apply")
        await expect(page.locator("#save-bar")).to_be_hidden()
        await expect(page.locator("#self-test")).to_contain_text("Storing and restoring works")
        assert str(stored(tmp_path, "hot_cache_max_size")) == "3MB"
        await page.reload()
        await expect(page.locator("[name=hot_cache_max_size]")).to_have_value("3MB")
        await expect(page.locator("[name=strip_attribution]")).not_to_be_checked()
        await setting(page, "hot_cache_max_size").get_by_role("button").click()
        await expect(changes).to_have_count(1)
        await page.get_by_role("button", name="Save").click()
        await expect(setting(page, "hot_cache_max_size").locator(".source")).to_have_text("default")
        assert str(stored(tmp_path, "hot_cache_max_size")) == "20%"
        assert complaints == []


async def test_a_bad_size_shows_the_servers_sentence_at_the_field_and_is_not_saved(
    tape: Server, tmp_path: Path
) -> None:
    async with opened(tape) as (page, complaints):
        field, error = (
            page.locator("[name=hot_cache_max_size]"),
            page.locator("#error-hot_cache_max_size"),
        )

        await field.fill("101%")

        await expect(error).to_contain_text("a share must not exceed 100%")
        await expect(field).to_have_attribute("aria-invalid", "true")
        assert "error-hot_cache_max_size" in (await field.get_attribute("aria-describedby") or "")
        await page.locator("[name=decode_share]").fill("0.25")
        await page.get_by_role("button", name="Save").click()
        await expect(page.locator("#save-error")).to_contain_text("nothing was saved")
        await expect(field).to_be_focused()
        assert stored(tmp_path, "decode_share") == 0.5
        await field.fill("20%")
        await expect(error).to_be_empty()
        await page.get_by_role("button", name="Discard").click()
        await expect(page.locator("#save-bar")).to_be_hidden()
        assert [line for line in complaints if "422" not in line] == []


async def test_what_a_variable_sets_is_locked_and_says_so(tape: Server) -> None:
    async with opened(tape) as (page, _):
        row = setting(page, "max_queued_requests")

        await expect(row.locator("input")).to_be_disabled()
        await expect(row.locator("input")).to_have_value("7")
        await expect(row).to_contain_text("Set by OMLX_MAX_QUEUED_REQUESTS")
        await expect(row.locator(".source")).to_have_text("env OMLX_MAX_QUEUED_REQUESTS")


async def test_a_key_is_set_from_the_page_and_never_shown(tape: Server) -> None:
    key = "sk-browser-0123456789"
    async with opened(tape) as (page, _):
        await page.locator("[name=api_key]").fill(key)
        await page.get_by_role("button", name="Save").click()
        await expect(setting(page, "api_key").locator(".verdict")).to_be_visible()
        await page.reload()

        await expect(page.locator(".setting")).to_have_count(len(NAMES))
        assert key not in await page.content()
        await setting(page, "api_key").get_by_role("button", name="Remove").click()
        await page.get_by_role("button", name="Save").click()
        await expect(setting(page, "api_key").locator(".source")).to_have_text("default")


async def test_what_was_set_can_be_taken_along(tape: Server) -> None:
    async with opened(tape, permissions=["clipboard-read", "clipboard-write"]) as (page, _):
        await page.get_by_role("button", name="Copy as variables").click()
        await expect(page.get_by_role("button", name="Copied")).to_be_visible()
        variables = (await page.evaluate("navigator.clipboard.readText()")).split("\n")
        await page.get_by_role("button", name="Copy as flags").click()
        await expect(page.get_by_role("button", name="Copied")).to_have_count(2)
        flags = await page.evaluate("navigator.clipboard.readText()")

    assert "export OMLX_MAX_QUEUED_REQUESTS=7" in variables
    assert "export OMLX_PAGED_CACHE_BLOCK_SIZE=16" in variables
    assert all(line.startswith("export OMLX_") for line in variables)
    assert flags.startswith("omlx serve --")
    assert " --paged-cache-block-size 16" in flags


async def test_search_finds_by_name_and_by_word(tape: Server) -> None:
    async with opened(tape) as (page, _):
        await page.locator("#search").fill("codec")

        await expect(page.locator(".setting:visible")).to_have_count(1)
        await page.locator("#search").fill("nothing like it")
        await expect(page.locator("#nothing")).to_be_visible()


async def test_the_preview_fills_a_row_for_each_codec(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    async with (
        serving(model_path("qwen3_5"), tmp_path, in_file=True) as server,
        opened(server) as (page, complaints),
    ):
        warning = setting(page, "gdn_sidecar_state_dtype").locator(".note")
        await expect(warning).to_be_hidden()
        await page.locator("[name=gdn_sidecar_state_dtype]").select_option("rht_int8")
        await expect(warning).to_contain_text("loses precision")

        await page.get_by_role("button", name="Run preview").click()

        await expect(page.locator(".codecs tbody tr")).to_have_count(5)
        await expect(page.locator(".codecs tbody tr").first).to_contain_text("in use")
        assert complaints == []


async def test_without_recurrent_layers_the_preview_says_why_there_is_none(tape: Server) -> None:
    async with opened(tape) as (page, _):
        await expect(page.get_by_role("button", name="Run preview")).to_be_disabled()
        await expect(page.locator(".codecs")).to_contain_text("no recurrent layers")


@pytest.mark.parametrize("width", [390, 820, 1280])
@pytest.mark.parametrize("locale", ["en", "zh-CN"])
async def test_nothing_scrolls_sideways(tape: Server, width: int, locale: str) -> None:
    size = {"width": width, "height": 844}
    async with opened(tape, viewport=size, locale=locale) as (page, complaints):
        await page.locator("[name=model_aliases]").fill("x" * 200)
        await expect(page.locator("#error-model_aliases")).not_to_be_empty()

        inner, scroll = await page.evaluate("[innerWidth, document.documentElement.scrollWidth]")

        assert scroll <= inner
        assert complaints == []
