"""Reads what the checks need from the machine. Thin: nothing is judged here."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from http.client import HTTPConnection, HTTPException
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from omlx import blas
from omlx.budget import cgroup_limit_bytes
from omlx.doctor.disk import existing_parent
from omlx.doctor.facts import Home, Machine, ModelFolder, Packages, Pin, Port
from omlx.models.locate import ModelUnavailable, locate

ANSWER_S = 2.0
"""How long a server on our port may take to say who it is."""

_PINNED = ("mlx", "mlx-lm")
_BACKENDS = ("mlx-metal", "mlx-cuda-13", "mlx-cuda-12", "mlx-cpu")


# ── machine and packages ─────────────────────────────────────────────────────────────────────


def look_at_machine() -> Machine:
    memory = psutil.virtual_memory()
    name, version = platform.libc_ver()
    return Machine(
        platform.system(),
        platform.machine(),
        (sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        _pair(version) if name == "glibc" else None,
        os.cpu_count() or 1,
        os.getloadavg()[0],
        int(memory.total),
        int(memory.available),
        cgroup_limit_bytes(),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        _driver(),
    )


def look_at_packages() -> Packages:
    return Packages(
        tuple(_pins()),
        tuple(name for name in _BACKENDS if _version(name) is not None),
        blas.backend_error(),
    )


def _pins() -> list[Pin]:
    """What the installed package omlx asks for of MLX; nothing in a checkout that is not."""
    try:
        wanted = [Requirement(text) for text in metadata.requires("omlx") or ()]
    except metadata.PackageNotFoundError:
        return []
    found: list[Pin] = []
    for requirement in wanted:
        if requirement.name in _PINNED and requirement.marker is None:
            version = _version(requirement.name)
            fits = version is not None and requirement.specifier.contains(version, prereleases=True)
            found.append(Pin(requirement.name, str(requirement.specifier), version, fits))
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> tuple[int, ...] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        asked = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=3,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    numbers = re.match(r"\d+(\.\d+)*", asked.stdout.strip())
    return tuple(map(int, numbers[0].split("."))) if numbers else None


def _pair(version: str) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def look_at_home(home: Path) -> Home:
    exists = home.is_dir()
    folder = home if exists else existing_parent(home)
    blocked = home.exists() and not exists
    return Home(home, exists, os.access(folder, os.W_OK | os.X_OK) and not blocked)


# ── the port ─────────────────────────────────────────────────────────────────────────────────


def look_at_port(host: str, port: int) -> Port:
    """Try to bind as the server would, and ask who is there when that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            # Only this finds a listener that allows others to bind as well.
            probe.listen(1)
        return Port(host, port, "free")
    except OSError as error:
        if error.errno == errno.EACCES:
            return Port(host, port, "denied")
        if error.errno != errno.EADDRINUSE:
            return Port(host, port, "no_such_address", status=error.strerror or str(error))
    return _who_is_there(host, port)


def _who_is_there(host: str, port: int) -> Port:
    wildcard = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    connection = HTTPConnection(wildcard.get(host, host), port, timeout=ANSWER_S)
    try:
        # The one page of ours that is open to all and names us.
        connection.request("GET", "/admin/login")
        page = connection.getresponse()
        is_ours = page.status == 200 and b"omlx" in page.read(65536)
        if not is_ours:
            return Port(host, port, "taken", "http", page.getheader("Server", ""))
        connection.close()
        connection.request("GET", "/health")
        body = json.loads(connection.getresponse().read(65536))
        text = " ".join(str(body[name]) for name in ("status", "model") if name in body)
        return Port(host, port, "taken", "omlx", text)
    except (OSError, HTTPException, ValueError, TypeError):
        return Port(host, port, "taken", "silence")
    finally:
        connection.close()


# ── the model ────────────────────────────────────────────────────────────────────────────────


def look_at_model(name: str, model_dir: Path) -> ModelFolder:
    """Find the model; its headers are read, its weights are not."""
    folder = model_dir if model_dir.is_dir() else existing_parent(model_dir)
    try:
        free = shutil.disk_usage(folder).free
        located = locate(name, model_dir)
    except ModelUnavailable as error:
        return ModelFolder(name, None, fault=str(error))
    except OSError as error:
        return ModelFolder(name, None, fault=f"{folder}: {error.strerror or error}")
    return ModelFolder(located.id, located.path, located.to_fetch or "", free_bytes=free)
