"""The texts of the admin pages: one catalogue a page and language, in ``static/i18n``.

``<page>.<language>.json`` maps flat keys to texts; each key begins with the name of its page
(``cache.title``), so a key says which file it is in. ``{name}`` in a text stands for a value.
Templates and scripts read the same files (``static/js/i18n.js`` is the other half).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import orjson
from aiohttp import web
from markupsafe import Markup, escape

LANGUAGES = {"en": "English", "zh": "中文"}
"""What there is, each by its own name. The first is for everybody who wants none of the others."""

LANGUAGE_COOKIE = "omlx_lang"
"""Set by the page's own switch. It says nothing but a language, so scripts may read it."""

DEFAULT = next(iter(LANGUAGES))
WISHES_MAX = 20
"""Languages in an Accept-Language header that are looked at."""


class Texts:
    """All texts in one language."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def __call__(self, key: str, **values: object) -> Markup:
        """The text, safe to put into a page: it and its values are escaped, but for Markup.

        Raises KeyError for a key that is in no catalogue, and for a value that is missing.
        """
        return escape(self._texts[key]).format(**values)


def load_texts(folder: Path) -> dict[str, Texts]:
    """Every catalogue in ``folder``, by language."""
    return {
        language: Texts(
            {
                key: text
                for file in sorted(folder.glob(f"*.{language}.json"))
                for key, text in orjson.loads(file.read_bytes()).items()
            }
        )
        for language in LANGUAGES
    }


def language_of(request: web.Request) -> str:
    """What the reader chose; else the first of the browser's languages that we have."""
    chosen = request.cookies.get(LANGUAGE_COOKIE)
    if chosen in LANGUAGES:
        return chosen
    return wished(request.headers.get("Accept-Language", ""))


def wished(header: str) -> str:
    """The best language for an Accept-Language header: RFC 9110, 12.5.4, by primary tag."""
    best, best_weight = DEFAULT, 0.0
    for wish in header.split(",")[:WISHES_MAX]:
        tag, _, parameter = wish.partition(";")
        language = tag.strip().partition("-")[0].lower()
        weight = _weight(parameter)
        if language in LANGUAGES and weight > best_weight:
            best, best_weight = language, weight
    return best


def _weight(parameter: str) -> float:
    name, _, value = parameter.strip().partition("=")
    if not name:
        return 1.0
    try:
        return float(value) if name == "q" else 1.0
    except ValueError:
        return 0.0
