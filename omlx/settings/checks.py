"""What is wrong with values: each by itself, several together, and those without any effect.

``validated`` and ``check_together`` refuse, ``warnings_of`` and ``unknown_variables`` report.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pydantic import SecretStr, ValidationError

from omlx import blas
from omlx.settings.model import ENV_PREFIX, NAMES, SECRETS, Settings, constraints, env_name
from omlx.settings.origin import SettingsError, Source, as_given, did_you_mean, quoted

HOME_VARIABLE = "OMLX_HOME"
KEY_LENGTH_ADVISED = 16

# Variables of ours that are no settings: what they say is needed before there are any.
_OTHER_VARIABLES = (HOME_VARIABLE, blas.OPT_OUT)


def validated(given: Mapping[str, object], sources: Mapping[str, Source]) -> Settings:
    """The settings, each read and checked by itself.

    Raises SettingsError for the first that is refused. ``sources`` holds each name of ``given``.
    """
    try:
        return Settings(**given)  # pyright: ignore[reportArgumentType]
    except ValidationError as refused:
        error = refused.errors()[0]
        name = str(error["loc"][0])
        cause = error.get("ctx", {}).get("error", error["msg"])
        raise SettingsError(
            f"{as_given(name, sources[name], given[name])} is refused: "
            f"{str(cause)[0].lower()}{str(cause)[1:]}. Give {constraints(name)['text']}.",
            name,
        ) from None  # the library's error carries all inputs, the keys among them


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. A name that we do not know is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_together(settings: Settings, sources: Mapping[str, Source], home: Path) -> None:
    """Refuse an open server that others can reach, and a cache where other files are."""
    if settings.api_key is None and not is_loopback(settings.host):
        raise SettingsError(
            f"{as_given('host', sources['host'], settings.host)} lets other machines in, and no "
            f"key is set. Set {env_name('api_key')}, or bind 127.0.0.1.",
            "host",
        )
    folder = settings.ssd_cache_dir
    for refused, what in (
        (Path(folder.anchor), "the whole volume"),
        (home, f"${HOME_VARIABLE} itself"),
        (Path("~"), "your home directory"),
    ):
        if _is_same(folder, refused):
            raise SettingsError(
                f"{as_given('ssd_cache_dir', sources['ssd_cache_dir'], folder)} is refused: it "
                f"is {what}. Name a folder of its own, such as {home / 'cache'}.",
                "ssd_cache_dir",
            )


def _is_same(left: Path, right: Path) -> bool:
    try:
        left, right = left.expanduser(), right.expanduser()
        # samefile knows volumes where case does not matter, resolve what does not exist yet.
        return left.resolve() == right.resolve() or left.samefile(right)
    except (OSError, RuntimeError):
        return False  # one does not exist, or there is no home


_SSD_WRITING = (
    "ssd_cache_dir",
    "ssd_free_space_floor",
    "ssd_write_policy",
    "ssd_pending_max_size",
    "gdn_snapshot_storage",
    "gdn_ssd_pending_max_size",
    "gdn_sidecar_state_dtype",
)

# These settings have no effect, because of that setting, when this holds. The first row counts.
_NO_EFFECT: tuple[tuple[tuple[str, ...], str, Callable[[Settings], bool]], ...] = (
    (
        ("hot_cache_max_size", "ssd_cache_max_size", *_SSD_WRITING),
        "cache_enabled",
        lambda settings: not settings.cache_enabled,
    ),
    (_SSD_WRITING, "ssd_cache_max_size", lambda settings: settings.ssd_cache_max_size.is_zero),
    (
        ("gdn_ssd_pending_max_size",),
        "gdn_snapshot_storage",
        lambda settings: settings.gdn_snapshot_storage == "embedded",
    ),
    (
        ("initial_cache_blocks",),
        "max_cache_blocks",
        lambda settings: (
            settings.max_cache_blocks is not None
            and settings.initial_cache_blocks > settings.max_cache_blocks
        ),
    ),
)


def warnings_of(settings: Settings, sources: Mapping[str, Source]) -> Iterable[str]:
    """Warn of what was set without any effect, and of keys that are easy to guess."""
    idle: dict[str, str] = {}
    for names, because, holds in _NO_EFFECT:
        if holds(settings):
            idle = {name: because for name in names} | idle
    for name, because in idle.items():
        if sources[name].kind != "default":
            left, right = (as_given(n, sources[n], getattr(settings, n)) for n in (name, because))
            yield f"{left} has no effect because of {right}."
    for name in sorted(SECRETS):
        key: SecretStr | None = getattr(settings, name)
        if key is not None and len(key.get_secret_value()) < KEY_LENGTH_ADVISED:
            yield (
                f"{as_given(name, sources[name], '')} is short; "
                f"{KEY_LENGTH_ADVISED} characters or more are hard to guess."
            )


def unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    """Warn of variables that look like ours and are not. Their values may be keys: never shown."""
    known = {*_OTHER_VARIABLES, *map(env_name, NAMES)}
    for variable in sorted(environ):
        upper = variable.upper()
        if upper.startswith(ENV_PREFIX) and variable not in known:
            hint = did_you_mean(upper, sorted(known))
            yield f"The environment variable {quoted(variable)} is not known{hint}"
