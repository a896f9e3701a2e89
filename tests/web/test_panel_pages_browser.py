"""The cache page shows and cares for what is stored; the chat shows what the cache is worth; the
connect page tells clients the truth.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.web.browsing import ADMIN_KEY, API_KEY, CHROMIUM, chromium, visiting
from tests.web.serving import Server, chat, loop_for_ever, serving

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]

HOSTILE = "<img src=x onerror=window.hacked=1>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def panel(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    home = tmp_path_factory.mktemp("home")
    keys: dict[str, Any] = {"api_key": API_KEY, "admin_key": ADMIN_KEY}
    async with serving(model_path("tape"), home, model_aliases={"nick": "tape"}, **keys) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, panel: Server) -> AsyncIterator[Page]:
    async with visiting(browser, panel) as visit:
        yield visit.page
        assert visit.complaints == []


async def stored(server: Server, *texts: str) -> None:
    for text in texts:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        status, answer, _ = await server.post(chat(text, max_tokens=2), headers=headers)
        assert status == 200, answer


# ── the prefix tree ──────────────────────────────────────────────────────────────────────────

LAID_OUT = """async (listed) => {
  const { grow, walk } = await import("/static/js/prefix_tree.js");
  const forest = grow(listed);
  const keys = (from, ...keys) =>
    keys.reduce((node, key) => walk(forest, node, key), forest.byHash.get(from)).hash;
  return {
    boxes: forest.nodes.map((n) => [n.hash, n.start, n.end, n.row, n.rows]),
    rows: forest.rows,
    right: keys("a", "ArrowRight"),
    twice: keys("a", "ArrowRight", "ArrowDown"),
    over: keys("c", "ArrowDown"),
    back: keys("d", "ArrowLeft", "ArrowLeft"),
    end: keys("a", "End"),
    stuck: keys("a", "ArrowLeft"),
    check: keys("b", "ArrowRight"),
  };
}"""


def node(name: str, parent: str, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"hash": name, "parent": parent, "tokens": tokens, "checkpoint": False, "block": None,
            "tiers": ["ram"], "refs": 0, **fields}  # fmt: skip


async def test_a_branch_has_a_row_and_a_token_its_place(page: Page, panel: Server) -> None:
    listed = [
        node("a", "root", 16),
        node("b", "a", 16),
        node("c", "a", 8),
        node("state", "b", 4, checkpoint=True),
        node("d", "other", 5),
    ]
    await page.goto(f"{panel.url}/admin/cache")

    laid = await page.evaluate(LAID_OUT, listed)

    assert laid["boxes"] == [
        ["a", 0, 16, 0, 2],
        ["b", 16, 32, 0, 1],
        ["c", 16, 24, 1, 1],
        ["state", 32, 36, None, None],  # drawn on its block, it needs no row
        ["d", 0, 5, 2, 1],
    ]
    assert laid["rows"] == 3
    assert (laid["right"], laid["twice"], laid["over"]) == ("b", "c", "d")
    assert (laid["back"], laid["stuck"], laid["end"]) == ("d", "a", "d")
    assert laid["check"] == "state"


async def test_the_tree_grows_with_what_is_asked_and_tells_of_each_node(
    page: Page, panel: Server
) -> None:
    await stored(panel, "The first prompt fills more than a block of tokens.")
    await page.goto(f"{panel.url}/admin/cache")
    items = page.locator("#tree [role=treeitem]")
    await expect(items.first).to_be_visible()
    before = await items.count()

    await stored(panel, "Another prompt, which parts from the first one early, and is long too.")

    await expect(items.nth(before)).to_be_attached()
    await page.locator("#tree").press("ArrowRight")
    await expect(page.locator("#node-title")).to_contain_text("Block")
    await expect(page.locator("#node")).to_contain_text("RAM")
    selected = page.locator("[aria-selected=true]")
    name = await selected.get_attribute("id")
    assert await page.locator("#tree").get_attribute("aria-activedescendant") == name
    shown = await items.count()
    await page.locator("#tree").press("Enter")
    assert await items.count() < shown
    await page.get_by_role("button", name="Whole tree").click()
    await expect(items).to_have_count(shown)


async def test_a_prompt_is_looked_up_and_not_computed(page: Page, panel: Server) -> None:
    text = "A prompt that was computed once and is found again."
    await stored(panel, text)
    await page.goto(f"{panel.url}/admin/cache")

    await page.locator("#probe-text").fill(text)
    await page.get_by_role("button", name="Look it up").click()

    await expect(page.locator("#probe-found")).to_contain_text("would be reused")
    await expect(page.locator("#probe-found")).to_contain_text("to compute 1")


async def test_files_are_verified_and_damage_is_named(page: Page, panel: Server) -> None:
    await stored(panel, "Something that has a file, since the server writes it when it idles.")
    root = panel.app.edge.loaded.settings.ssd_cache_dir
    await panel.gauges(lambda stats: stats["cache"]["ssd_files"] > 0
                       and stats["cache"]["pending_bytes"] == 0)  # fmt: skip
    await page.goto(f"{panel.url}/admin/cache")
    verify = page.get_by_role("button", name="Verify files")

    await verify.click()
    await expect(page.locator("#care-note")).to_contain_text("All sound")
    (damaged, *_) = sorted(root.rglob("*.safetensors"))
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    await verify.click()

    await expect(page.locator("#care-note")).to_contain_text("1 damaged")
    await expect(page.locator("#bad-files")).to_contain_text(damaged.name)
    await expect(page.locator("#verifying")).to_be_hidden()


async def test_a_tier_is_cleared_after_a_question_only(page: Page, panel: Server) -> None:
    await stored(panel, "Something that is in RAM.")
    await page.goto(f"{panel.url}/admin/cache")
    await expect(page.locator("#models")).to_contain_text("tape")
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url) if r.method == "POST" else None)

    await page.get_by_role("button", name="Clear RAM…").click()
    await expect(page.get_by_role("dialog")).to_contain_text("can't be undone")
    await page.keyboard.press("Enter")  # on what has the focus: to cancel
    await expect(page.get_by_role("dialog")).to_be_hidden()
    assert asked == []
    await page.get_by_role("button", name="Clear RAM…").click()
    await page.locator("#confirm-yes").click()

    await expect(page.locator("#care-note")).to_contain_text("Freed")
    assert asked == [f"{panel.url}/admin/api/cache/clear"]


# ── chat ─────────────────────────────────────────────────────────────────────────────────────


async def say(page: Page, text: str) -> None:
    await page.locator("#text").fill(text)
    await page.locator("#text").press("Enter")


async def test_the_same_prompt_again_is_seen_to_be_cached(page: Page, panel: Server) -> None:
    await page.goto(f"{panel.url}/admin/chat")

    await say(page, "A question that nobody has asked before.")
    tries = page.locator(".try")
    await expect(page.locator(".answer")).to_have_text("alpha beta gamma delta")
    await expect(tries).to_have_count(1)
    await page.get_by_role("button", name="Send again").click()
    await expect(tries).to_have_count(2)

    usage = await page.evaluate("document.querySelectorAll('.try')[1].textContent")
    cached, prompt = usage.split("cached")[1].split(" tokens")[0].split(" of ")
    assert int(cached) == int(prompt) - 1
    await expect(tries.nth(1)).to_contain_text("first token")
    await expect(page.locator("#announcer")).to_contain_text("complete")


async def test_an_earlier_message_can_be_said_differently(page: Page, panel: Server) -> None:
    await page.goto(f"{panel.url}/admin/chat")
    await say(page, "One")
    await expect(page.locator(".try")).to_have_count(1)
    await say(page, "Two")
    await expect(page.locator(".try")).to_have_count(2)

    await page.get_by_role("button", name="Edit").first.click()

    await expect(page.locator(".turn")).to_have_count(0)
    await expect(page.locator("#text")).to_have_value("One")
    await page.get_by_role("button", name="Send", exact=True).click()
    await expect(page.locator(".turn")).to_have_count(2)
    await expect(page.locator(".try")).to_have_count(1)


async def test_an_answer_can_be_stopped(page: Page, panel: Server) -> None:
    async def endless(route: Any) -> None:
        body = json.loads(route.request.post_data)
        await route.continue_(post_data=json.dumps(body | loop_for_ever(max_tokens=1500)))

    await page.route("**/admin/api/v1/chat/completions", endless)
    await page.goto(f"{panel.url}/admin/chat")
    await say(page, "Go on for ever")
    await expect(page.locator(".answer")).to_contain_text("three one two three")

    async with panel.watching() as ended:
        await page.get_by_role("button", name="Stop").click()
        row = await ended()

    assert row["state"] == "cancelled"
    await expect(page.locator(".try")).to_contain_text("Stopped")
    await expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


async def test_what_is_said_stays_text(page: Page, panel: Server) -> None:
    await page.goto(f"{panel.url}/admin/chat")
    await page.locator("#system").fill(HOSTILE)
    await say(page, HOSTILE)

    await expect(page.locator(".said")).to_have_text(HOSTILE)
    nodes = await page.evaluate(
        """async (text) => {
          const { markdown } = await import("/static/js/markdown.js");
          const place = document.createElement("div");
          place.append(...markdown(text));
          return [place.innerHTML, place.querySelectorAll("img, script").length];
        }""",
        f"# {HOSTILE}\n**{HOSTILE}**\n- `{HOSTILE}`\n[x](javascript:alert) [y](https://a.example)\n"
        f"```\n{HOSTILE}",
    )
    html, made = nodes
    assert made == 0
    assert await page.evaluate("window.hacked") is None
    assert 'href="https://a.example"' in html and "javascript:alert" not in html.split("href")[1]
    assert html.count("&lt;img") == 4


async def test_a_refusal_is_shown_in_the_servers_words(page: Page, panel: Server) -> None:
    await page.goto(f"{panel.url}/admin/chat")
    await page.locator("#tools").fill("{not json")
    await say(page, "Hello")

    await expect(page.locator(".answer")).to_contain_text("not valid JSON")
    await expect(page.locator("#tools-problem")).not_to_be_empty()


# ── connect ──────────────────────────────────────────────────────────────────────────────────


async def test_every_snippet_has_the_real_address_and_no_key(page: Page, panel: Server) -> None:
    await page.goto(f"{panel.url}/admin/connect")
    await expect(page.locator("#addresses")).to_contain_text(f"{panel.url}/v1")
    await expect(page.locator("#addresses")).to_contain_text("nick")

    tabs = page.get_by_role("tab")
    assert await tabs.count() >= 9
    for tab in await tabs.all():
        await tab.click()
        code = await page.locator("#client").inner_text()
        assert f"127.0.0.1:{panel.port}" in code or "llm" in code
        assert "tape" in code or "OPENAI_API" in code
        assert "OMLX_API_KEY" in code
    html = await page.content()
    assert API_KEY not in html and ADMIN_KEY not in html


async def test_each_dialect_answers_through_the_login(page: Page, panel: Server) -> None:
    await page.goto(f"{panel.url}/admin/connect")
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        await page.get_by_role("button", name=f"Send a request to {path}", exact=True).click()
    await expect(page.locator("#tests .chip[data-level=ok]")).to_have_count(3)


async def test_a_snippet_is_copied(browser: Browser, panel: Server) -> None:
    async with visiting(browser, panel) as visit:
        await visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await visit.page.goto(f"{panel.url}/admin/connect#codex")
        await visit.page.get_by_role("button", name="Copy: Codex").click()

        copied = await visit.page.evaluate("navigator.clipboard.readText()")

    assert 'wire_api = "responses"' in copied
    assert f'base_url = "{panel.url}/v1"' in copied
