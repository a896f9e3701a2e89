"""Whether a start with changed settings would succeed, as far as that can be known beforehand."""

from __future__ import annotations

import socket
from pathlib import Path

from omlx.disk.directory import CacheDirectory, CacheDirectoryLocked, CacheDirectoryUnusable
from omlx.models.locate import ModelUnavailable, locate
from omlx.settings import Loaded, SettingsError


def check_start(running: Loaded, changed: Loaded, names: frozenset[str]) -> None:
    """Try what ``changed`` needs of the machine and ``running`` has not got already.

    Raises SettingsError about one of ``names``. Makes a cache directory that is not there yet.
    """
    settings = changed.settings
    if "host" in names:
        _try_to_bind(settings.host, 0, "host")
    if "port" in names and settings.port != running.settings.port:
        _try_to_bind(settings.host, settings.port, "port")
    if "ssd_cache_dir" in names and settings.ssd_cache_dir != running.settings.ssd_cache_dir:
        _try_folder(settings.ssd_cache_dir)
    for name in ("model", "model_dir"):
        if name in names:
            _try_to_find(settings.model, settings.model_dir, name)


def _try_to_bind(host: str, port: int, name: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        what = f"port {port} on {host}" if port else host
        raise SettingsError(
            f"{name}: this machine can't listen on {what} ({error.strerror or error}). "
            "Choose another.",
            name,
        ) from None


def _try_folder(folder: Path) -> None:
    directory = CacheDirectory(folder)
    try:
        directory.acquire()
    except (CacheDirectoryLocked, CacheDirectoryUnusable) as error:
        raise SettingsError(f"{error}. Name another folder.", "ssd_cache_dir") from None
    directory.release()


def _try_to_find(model: str, model_dir: Path, name: str) -> None:
    try:
        located = locate(model, model_dir)
    except ModelUnavailable as error:
        raise SettingsError(f"{name}: {error}.", name) from None
    if located.to_fetch == "hub":
        raise SettingsError(
            f"{name}: {model} is not in {model_dir} yet. Fetch it first: omlx pull {model}.", name
        )
