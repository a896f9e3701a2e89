"""The settings as people read them: values and defaults in words, and the tables of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import SecretStr

from omlx.settings.model import NAMES, SECRETS, Apply, Settings, apply_class, constraints
from omlx.settings.sources import Loaded
from omlx.settings.values import Hint
from omlx.sizes import Size

WHEN: dict[Apply, str] = {
    "live": "at once",
    "next_request": "with the next request or file",
    "reload": "when the model is loaded: at a restart",
    "restart": "at a restart",
}


class Row(NamedTuple):
    """A setting, told to people. ``value`` of a key is "set" or None, never the key."""

    name: str
    value: str | None
    default: str
    source: str
    apply: Apply
    unit: str


def describe(loaded: Loaded) -> list[Row]:
    """One row per setting, for the start-up print, ``omlx doctor`` and the admin page."""
    return [
        Row(
            name,
            value_text(loaded.settings, name),
            default_text(name),
            str(loaded.sources[name]),
            _extra(name)["apply"],
            _extra(name)["unit"],
        )
        for name in NAMES
    ]


def value_text(settings: Settings, name: str) -> str | None:
    """The value as one would write it in a flag; a key is "set" or None."""
    value = getattr(settings, name)
    match value:
        case SecretStr():
            return "set"
        case None if name in SECRETS:
            return None
        case None:
            return _extra(name).get("shown")
        case bool():
            return "true" if value else "false"
        case tuple():
            return ",".join(value) or "none"
        case dict():
            return ",".join(f"{alias}={target}" for alias, target in value.items()) or "none"
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def plain_value(settings: Settings, name: str) -> object:
    """The value as JSON has it, which is also how it is given; a key is "set" or None."""
    value = getattr(settings, name)
    match value:
        case SecretStr():
            return "set"
        case tuple():
            return list(value)
        case Size() | Path():
            return str(value)
        case _:
            return value


def kind_of(name: str) -> str:
    """What sort of control a page shows: one of the values of ``_KINDS``, or ``choice``."""
    rules = Settings.model_fields[name].metadata
    hint = next((rule for rule in rules if isinstance(rule, Hint)), None)
    return "choice" if hint is None else _KINDS[hint.metavar]


def default_text(name: str) -> str:
    """The default in words: ``20%``, ``the model's``, ``$OMLX_HOME/cache``, ``none``."""
    return _extra(name).get("shown") or value_text(_DEFAULTS, name) or "none"


def settings_table() -> str:
    """The README's table of settings, in Markdown."""
    rows = ["| setting | default | meaning | takes effect |", "|---|---|---|---|"]
    for name, info in Settings.model_fields.items():
        limits = constraints(name)
        # The text of a kind without limits is the same for all of it, and no news.
        accepts = f" Accepts {limits['text']}." if {"min", "choices"} & limits.keys() else ""
        cells = (
            f"`{name}`",
            default_and_unit(name),
            f"{info.description}{accepts}",
            WHEN[apply_class(name)],
        )
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def unit_and_description(name: str) -> tuple[str, str]:
    return _extra(name)["unit"], Settings.model_fields[name].description or ""


def default_and_unit(name: str) -> str:
    says_unit = "shown" in _extra(name) or _extra(name)["unit"] in ("", "bytes")
    return default_text(name) if says_unit else f"{default_text(name)} {_extra(name)['unit']}"


def _extra(name: str) -> dict[str, Any]:
    extra = Settings.model_fields[name].json_schema_extra
    assert isinstance(extra, dict), "every field is made by model._setting"
    return extra


_KINDS = {
    "": "switch",
    "N": "whole",
    "X": "number",
    "SIZE": "size",
    "HOST": "text",
    "MODEL": "text",
    "DIR": "folder",
    "A,B": "list",
    "A=B,C=D": "pairs",
    "KEY": "secret",
}
"""By how a value is written in help texts."""

# Absolute folders, so that the module can be imported by a user without a home directory.
_DEFAULTS = Settings(model_dir=Path("/"), ssd_cache_dir=Path("/"))
