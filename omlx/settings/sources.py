"""Bring the sources together, and remember for each value which one it came from.

command line  >  environment  >  $OMLX_HOME/settings.json  >  default
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omlx.settings.checks import (
    HOME_VARIABLE,
    check_together,
    unknown_variables,
    validated,
    warnings_of,
)
from omlx.settings.file import SETTINGS_FILE, check_mode, check_set_aside, read_file
from omlx.settings.model import NAMES, Settings, env_name, flag
from omlx.settings.origin import SettingsError, Source, did_you_mean, quoted
from omlx.settings.values import read_folder


@dataclass(frozen=True)
class Loaded:
    """Settings that may be used together, each with its source."""

    settings: Settings
    sources: dict[str, Source]
    warnings: tuple[str, ...]
    home: Path

    def is_set(self, name: str) -> bool:
        """Whether somebody set it, as opposed to the default."""
        return self.sources[name].kind != "default"

    def taking_over(self, newer: Loaded, names: Iterable[str]) -> Loaded:
        """These settings, but ``names`` as in ``newer``. Raises SettingsError when they don't fit.

        For a server that runs: some of what was saved is in force at once, and some is not.
        """
        changes = {name: getattr(newer.settings, name) for name in names}
        sources = self.sources | {name: newer.sources[name] for name in changes}
        settings = self.settings.model_copy(update=changes)
        check_together(settings, sources, self.home)
        return Loaded(settings, sources, tuple(warnings_of(settings, sources)), self.home)

    def changed(self, changes: Mapping[str, object | None]) -> Loaded:
        """The settings as they would be with ``changes`` in the settings file. Writes nothing.

        None stands for "back to default". Raises SettingsError when any change is unknown,
        locked by a flag or a variable, or invalid.
        """
        given = {name: getattr(self.settings, name) for name in NAMES if self.is_set(name)}
        sources = dict(self.sources)
        for name, value in changes.items():
            if name not in sources:
                raise SettingsError(
                    f"{quoted(name)} is not a setting{did_you_mean(name, NAMES)}",
                    name,
                    "unknown_setting",
                )
            if sources[name].kind in ("cli", "env"):
                raise SettingsError(
                    f"{name} is set by {sources[name].detail}. Unset that to change it here.",
                    name,
                    "locked",
                )
            given.pop(name, None)
            sources[name] = Source("default")
            if value is not None:
                given[name] = value
                sources[name] = Source("file", str(self.home / SETTINGS_FILE))
        return _loaded(given, sources, self.home)


def reread(loaded: Loaded) -> Loaded:
    """What a start with the same flags and variables would take now: the file may be another.

    Raises SettingsError when the file can't be used.
    """
    path = loaded.home / SETTINGS_FILE
    content = read_file(path, set_aside=False)
    return loaded.changed(
        {
            name: content.get(name)
            for name, source in loaded.sources.items()
            if source.kind not in ("cli", "env")
        }
    )


def home_directory(environ: Mapping[str, str]) -> Path:
    """Where the server keeps its own files: ``$OMLX_HOME``, by default ``~/.omlx``."""
    try:
        if HOME_VARIABLE in environ:
            return read_folder(environ[HOME_VARIABLE])
        return Path(environ["HOME"]) / ".omlx" if environ.get("HOME") else read_folder("~/.omlx")
    except ValueError as error:
        raise SettingsError(f"{HOME_VARIABLE}: {error}. Set it to a folder.") from None


def load_settings(
    argv_overrides: Mapping[str, object],
    environ: Mapping[str, str],
    home: Path,
    *,
    set_aside: bool = True,
) -> Loaded:
    """Bring the sources together: command line, then environment, then file, then default.

    Raises SettingsError for anything that cannot be used. A settings file that is broken is
    renamed to ``settings.json.corrupt-<time>``, unless ``set_aside`` is False, and refused.
    """
    assert set(argv_overrides) <= set(NAMES), "flags are made from the settings"
    path = home / SETTINGS_FILE
    file_values = read_file(path, set_aside=set_aside)
    given: dict[str, object] = {}
    sources = {name: Source("default") for name in NAMES}
    for name in NAMES:
        variable = env_name(name)
        if name in argv_overrides:
            given[name] = argv_overrides[name]
            sources[name] = Source("cli", _flag_given(name, given[name]))
        elif variable in environ:
            given[name] = environ[variable]
            sources[name] = Source("env", variable)
        elif name in file_values:
            given[name] = file_values[name]
            sources[name] = Source("file", str(path))
    loaded = _loaded(given, sources, home)
    warnings = (
        *unknown_variables(environ),
        *check_set_aside(path, loaded.settings),
        *check_mode(path),
        *loaded.warnings,
    )
    return Loaded(loaded.settings, sources, warnings, home)


def _loaded(given: Mapping[str, object], sources: dict[str, Source], home: Path) -> Loaded:
    folders = {"model_dir": home / "models", "ssd_cache_dir": home / "cache"}
    settings = validated({**folders, **given}, sources)
    check_together(settings, sources, home)
    return Loaded(settings, sources, tuple(warnings_of(settings, sources)), home)


def _flag_given(name: str, value: object) -> str:
    if value is False:
        return "--no-cache" if name == "cache_enabled" else flag(f"no_{name}")
    return flag(name)
