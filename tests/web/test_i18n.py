"""Every text of the admin pages is there in every language, with the same values in it."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from markupsafe import Markup

from omlx.resources import resource_dir
from omlx.web.i18n import DEFAULT, LANGUAGES, Texts, load_texts, wished
from omlx.web.pages import NAV

FOLDER = resource_dir("static") / "i18n"
PAGES = sorted({file.name.split(".")[0] for file in FOLDER.glob("*.json")})
TEMPLATES = sorted(resource_dir("templates").glob("*.html"))
SCRIPTS = sorted((resource_dir("static") / "js").glob("*.js"))

IN_TEMPLATE = re.compile(r"""\bt\(\s*["']([\w.]+)["']\s*(?:[,)]|(~))""")
# In quotes or backticks, also where a key is kept to be looked up later.
IN_SCRIPT = re.compile(r"""["'`]((?:""" + "|".join(PAGES) + r""")\.[\w.-]*)(\$\{|["'`])""")


def catalogue(page: str, language: str) -> dict[str, str]:
    return json.loads((FOLDER / f"{page}.{language}.json").read_text("utf-8"))


def keys(language: str = DEFAULT) -> set[str]:
    return {key for page in PAGES for key in catalogue(page, language)}


def used_in(files: list[Path]) -> set[tuple[str, bool, str]]:
    """Key, whether it is only the beginning of one, and the file."""
    found: set[tuple[str, bool, str]] = set()
    for file in files:
        pattern = IN_TEMPLATE if file.suffix == ".html" else IN_SCRIPT
        for key, after in pattern.findall(file.read_text("utf-8")):
            found.add((key, after in ("${", "~"), file.name))
    return found


def placeholders(text: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", text))


# ── catalogues ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", PAGES)
def test_every_language_has_the_same_texts_with_the_same_values(page: str) -> None:
    first = catalogue(page, DEFAULT)

    for language in LANGUAGES:
        other = catalogue(page, language)
        assert list(other) == list(first)
        for key, text in other.items():
            assert text.strip(), key
            assert placeholders(text) == placeholders(first[key]), key


@pytest.mark.parametrize("page", PAGES)
def test_a_key_says_which_file_it_is_in(page: str) -> None:
    assert all(key.startswith(f"{page}.") for key in catalogue(page, DEFAULT))


def test_a_text_with_forms_for_numbers_has_the_one_that_always_fits() -> None:
    plural = {key.removesuffix(".one") for key in keys() if key.endswith(".one")}

    assert {f"{key}.other" for key in plural} <= keys()


@pytest.mark.parametrize("file", [*TEMPLATES, *SCRIPTS], ids=lambda file: file.name)
def test_every_text_that_a_page_asks_for_is_there(file: Path) -> None:
    known = keys()
    for key, is_prefix, _ in used_in([file]):
        if is_prefix:
            assert any(each.startswith(key) for each in known), key
        else:
            assert key in known or f"{key}.other" in known, key


def test_no_text_is_kept_that_nobody_asks_for() -> None:
    used = used_in([*TEMPLATES, *SCRIPTS])
    whole = {key for key, is_prefix, _ in used if not is_prefix}
    begun = tuple(key for key, is_prefix, _ in used if is_prefix)
    by_base = {f"common.nav.{item.page}" for item in NAV} | {
        f"{file.stem}.title" for file in TEMPLATES
    }

    unused = {
        key
        for key in keys() - whole - by_base
        if not key.startswith(begun) and re.sub(r"\.(one|other)$", "", key) not in whole
    }

    assert not unused


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.name)
def test_a_template_holds_no_text_of_its_own(file: Path) -> None:
    source = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", "", file.read_text("utf-8"), flags=re.S)
    bare = re.sub(r"<(code|kbd)\b.*?</\1>|<[^>]*>", " ", source, flags=re.S)
    spoken = re.findall(r"""\b(?:aria-label|title|placeholder|alt)=["']([^"']*)""", source)

    words = re.findall(r"[^\W\d_]{2,}", f"{bare} {' '.join(spoken)}")

    assert set(words) <= {"omlx"}


# ── texts and values ─────────────────────────────────────────────────────────────────────────


def test_values_are_escaped_but_markup_is_not() -> None:
    texts = Texts({"page.key": "<{who}> & {code}"})

    text = texts("page.key", who="<b>", code=Markup("<code>x</code>"))

    assert text == "&lt;&lt;b&gt;&gt; &amp; <code>x</code>"


def test_a_text_that_is_nowhere_stops_the_start() -> None:
    with pytest.raises(KeyError):
        load_texts(FOLDER)[DEFAULT]("common.nothing")


# ── which language ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("header", "language"),
    [
        ("", "en"),
        ("zh", "zh"),
        ("zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        ("en-GB,en;q=0.9,zh;q=0.8", "en"),
        ("fr,zh;q=0.5,en;q=0.1", "zh"),
        ("fr,de", "en"),
        ("en;q=0.2, ZH-hant ; q=0.7", "zh"),
        ("zh;q=0", "en"),
        ("zh;q=x,;,=;q", "en"),
        ("zh;q=nan", "en"),
        (",".join(["xx"] * 100 + ["zh"]), "en"),
    ],
)
def test_the_browser_says_which_language(header: str, language: str) -> None:
    assert wished(header) == language


def test_languages_are_named_in_themselves() -> None:
    assert list(LANGUAGES.values()) == ["English", "中文"]
    assert all(left != right for left, right in pairwise(LANGUAGES))
