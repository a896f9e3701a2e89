"""The settings file ``$OMLX_HOME/settings.json``: read it, set a broken one aside, save it.

It fails closed. A broken file stops the start, because a key may have been in it, and for the
same reason the starts after that one stop as long as the file lies there, set aside as
``settings.json.corrupt-<time>``, and no other key is given.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import SecretStr

from omlx.settings.checks import validated
from omlx.settings.model import NAMES, Settings, env_name
from omlx.settings.origin import SettingsError, Source, did_you_mean, quoted
from omlx.sizes import Size

SETTINGS_FILE = "settings.json"


# ── reading ──────────────────────────────────────────────────────────────────────────────────


def read_file(path: Path, *, set_aside: bool) -> dict[str, object]:
    """What the file holds, unread; nothing when there is none.

    Raises SettingsError when it is unreadable, broken, or holds a name that is no setting. A
    broken one is renamed if ``set_aside``.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read ({error.strerror}). Let this user read it, or remove it.",
            code="broken_file",
        ) from None
    content, fault = _parse(raw)
    if fault:
        place = _set_aside(path) if set_aside else None
        moved, back = (f"It was moved to {place}. ", f" and move it back to {path}")
        raise SettingsError(
            f"{path} is broken ({fault}), and a key may have been in it. {moved if place else ''}"
            f"Repair it{back if place else ''}, or delete it to start without what it held.",
            code="broken_file",
        )
    for name in content:
        if name not in NAMES:
            raise SettingsError(
                f"{path} holds {quoted(name)}, which is not a setting"
                f"{did_you_mean(name, NAMES)} Correct or remove it.",
                name,
                "unknown_setting",
            )
    return content


def _parse(raw: bytes) -> tuple[dict[str, object], str]:
    """What the file holds, and what is wrong with it, without quoting it; empty when nothing."""
    try:
        content = json.loads(raw)
    except json.JSONDecodeError as error:
        return {}, f"no valid JSON at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):
        return {}, "no valid JSON text"
    return (content, "") if isinstance(content, dict) else ({}, "it holds no JSON object")


def set_aside_broken_file(home: Path) -> Path | None:
    """Rename the settings file to ``settings.json.corrupt-<time>`` if it is broken.

    For a server that read it with ``set_aside=False``, once the port is bound. Returns its new
    place, or None when it is whole, absent, unreadable or cannot be moved.
    """
    path = home / SETTINGS_FILE
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    _, fault = _parse(raw)
    return _set_aside(path) if fault else None


def _set_aside(path: Path) -> Path | None:
    """Rename the file; None when that is impossible, and then it stays and is refused again."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    place = path.with_name(f"{path.name}.corrupt-{stamp}")
    num_tries = 1
    while place.exists():
        num_tries += 1
        place = path.with_name(f"{path.name}.corrupt-{stamp}-{num_tries}")
    try:
        path.chmod(0o600)
        path.rename(place)
    except OSError:
        return None
    return place


def check_set_aside(path: Path, settings: Settings) -> Iterable[str]:
    """Warn of files that were set aside; raise SettingsError when no key is set besides."""
    places = sorted(path.parent.glob(f"{path.name}.corrupt-*"))
    if places and settings.api_key is None:
        # A supervisor starts the server again at once; that start must not be an open one.
        raise SettingsError(
            f"{places[0]} was set aside as broken and may hold a key. Repair it and move it back "
            f"to {path}, delete it to start without what it held, or set {env_name('api_key')}.",
            code="broken_file",
        )
    return [f"{place} was set aside as broken; what it held is not in force." for place in places]


def check_mode(path: Path) -> Iterable[str]:
    """Warn when users other than its owner may do anything with the file."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        return []
    warning = f"{path} is open to other users (mode {mode:04o}); run chmod 600 on it."
    return [warning] if mode & 0o077 else []


# ── saving ───────────────────────────────────────────────────────────────────────────────────


def save_settings_file(home: Path, changes: Mapping[str, object | None]) -> None:
    """Set the named settings in the file, and remove those that are None; keep the others.

    The file is the old or the new one at any time, mode 0600. Raises SettingsError, and changes
    nothing, when the result could not be loaded again; OSError when it cannot be written.
    """
    path = home / SETTINGS_FILE
    kept = read_file(path, set_aside=False)
    for name, value in changes.items():
        if name not in NAMES:
            raise SettingsError(
                f"{quoted(name)} is not a setting{did_you_mean(name, NAMES)}",
                name,
                "unknown_setting",
            )
        kept.pop(name, None)
        if value is not None:
            kept[name] = value
    settings = validated(kept, {name: Source("file", str(path)) for name in kept})
    plain = {name: _plain(getattr(settings, name)) for name in kept}
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_atomically(path, json.dumps(plain, indent=2) + "\n")


def _plain(value: object) -> object:
    match value:
        case SecretStr():
            return value.get_secret_value()
        case Size() | Path():
            return str(value)
        case _:
            return value


def _write_atomically(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)  # 0600 from the start, and on the same volume as its target
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105 - tests put a failing disk here
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
