"""Every setting of the server, where its value came from, and what is wrong with it.

Each module imports only those above it:

    values    how each kind of value is read
    model     the settings themselves, the one definition that all else is derived from
    origin    where a value came from, and how a message names it
    checks    what is refused and what is reported
    file      the settings file: read, set aside, save
    sources   command line > environment > file > default
    tables    values, defaults and limits in words
    sections  what belongs together for people
    cli       the flags

The hard idea is to fail closed. A value that cannot be understood stops the start, and so does a
broken settings file, because a key may have been in it. No message quotes a key. Nothing else in
the package omlx reads a setting from the environment.
"""

from omlx.settings.checks import HOME_VARIABLE, KEY_LENGTH_ADVISED, is_loopback
from omlx.settings.cli import add_arguments, overrides
from omlx.settings.file import SETTINGS_FILE, save_settings_file, set_aside_broken_file
from omlx.settings.model import (
    ENV_PREFIX,
    LIVE,
    NAMES,
    SECRETS,
    Apply,
    Settings,
    apply_class,
    constraints,
    env_name,
    flag,
)
from omlx.settings.origin import ErrorCode, SettingsError, Source, SourceKind
from omlx.settings.sections import SECTIONS, in_order, section_of
from omlx.settings.sources import Loaded, home_directory, load_settings, reread
from omlx.settings.tables import (
    Row,
    default_text,
    describe,
    kind_of,
    plain_value,
    settings_table,
    unit_and_description,
    value_text,
)

__all__ = [
    "ENV_PREFIX",
    "HOME_VARIABLE",
    "KEY_LENGTH_ADVISED",
    "LIVE",
    "NAMES",
    "SECRETS",
    "SECTIONS",
    "SETTINGS_FILE",
    "Apply",
    "ErrorCode",
    "Loaded",
    "Row",
    "Settings",
    "SettingsError",
    "Source",
    "SourceKind",
    "add_arguments",
    "apply_class",
    "constraints",
    "default_text",
    "describe",
    "env_name",
    "flag",
    "home_directory",
    "in_order",
    "is_loopback",
    "kind_of",
    "load_settings",
    "overrides",
    "plain_value",
    "reread",
    "save_settings_file",
    "section_of",
    "set_aside_broken_file",
    "settings_table",
    "unit_and_description",
    "value_text",
]
