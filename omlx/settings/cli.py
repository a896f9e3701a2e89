"""The command line: a flag for each setting, with its help."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from omlx.settings.model import NAMES, Settings, constraints, flag
from omlx.settings.tables import default_and_unit
from omlx.settings.values import Hint


def add_arguments(parser: argparse.ArgumentParser, names: Iterable[str] = NAMES) -> None:
    """Give ``parser`` a flag for each of ``names``. Read them back with ``overrides``."""
    for name in names:
        info = Settings.model_fields[name]
        text = f"{info.description} (default: {default_and_unit(name)})".replace("%", "%%")
        if info.annotation is bool:
            parser.add_argument(
                flag(name),
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
        else:
            hint = next((rule for rule in info.metadata if isinstance(rule, Hint)), None)
            choices = ",".join(constraints(name).get("choices", ()))
            parser.add_argument(
                flag(name),
                metavar=hint.metavar if hint else f"{{{choices}}}",
                default=argparse.SUPPRESS,
                help=text,
            )
        if name == "cache_enabled":
            parser.add_argument(
                "--no-cache",
                dest=name,
                action="store_const",
                const=False,
                default=argparse.SUPPRESS,
                help="The same as --no-cache-enabled.",
            )


def overrides(namespace: argparse.Namespace) -> dict[str, object]:
    """The settings that were given as flags, unread."""
    return {name: value for name, value in vars(namespace).items() if name in NAMES}
