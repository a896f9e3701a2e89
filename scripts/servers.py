"""Servers to measure, as processes, and the machine that they share with others."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import psutil
from chats import Endpoint, http_session

from omlx.settings import home_directory

ROOT = Path(__file__).resolve().parents[1]
START_S = 900.0
"""Fetching the model is part of a first start."""

MEASURED = ("omlx", "mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm")

CALM = 0.1
"""Cores that others may take while something is measured."""

LISTEN_S = 0.3
"""How long the machine is watched before it is called calm."""

T = TypeVar("T")


@dataclass
class Server:
    """A server process that is ready."""

    endpoint: Endpoint
    home: Path
    log: Path

    @property
    def announced(self) -> list[str]:
        """What it said when it started: model, backend, sizes; without the times."""
        lines = self.log.read_text("utf-8").splitlines()
        said = [line[9:].removeprefix("INFO").strip() for line in lines]
        return said[: said.index("ready")] if "ready" in said else said


@asynccontextmanager
async def serving(
    model: str, home: Path, *options: str, fields: Mapping[str, Any]
) -> AsyncIterator[Server]:
    """A server of this checkout with its own home, on a free port; ended with SIGTERM.

    ``fields`` are added to each request.
    """
    port = free_port()
    log = home / "server.log"
    process = await _started(_command(model, home, port, options), home, log)
    endpoint = Endpoint(f"http://127.0.0.1:{port}", fields=fields)
    try:
        await until_ready(f"{endpoint.url}/health", process, log)
        yield Server(endpoint, home, log)
    finally:
        await ended(process)


def _command(model: str, home: Path, port: int, options: Sequence[str]) -> list[str]:
    home.mkdir(parents=True, exist_ok=True)
    models = home_directory(os.environ) / "models"
    path = Path(model)
    return [
        *(sys.executable, "-m", "omlx", "serve", "--port", str(port)),
        *("--model", str(path.resolve()) if path.is_dir() else model),
        *("--model-dir", str(models), "--ssd-cache-dir", str(home / "cache"), *options),
    ]


async def _started(command: Sequence[str], home: Path, log: Path) -> asyncio.subprocess.Process:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMLX_")}
    with log.open("wb") as written:
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,  # so that this checkout is measured, whatever is installed
            env={**environment, "OMLX_HOME": str(home)},
            stderr=written,
        )


async def until_sigterm(work: Awaitable[T]) -> T:
    """Do the work, and end it as ctrl-C would at SIGTERM, so that no server is left behind."""
    task = asyncio.current_task()
    assert task is not None, "called within a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        raise SystemExit("ended by a signal") from None


async def ended(process: asyncio.subprocess.Process) -> None:
    """End it with SIGTERM, if it still runs, and wait for that."""
    if process.returncode is None:
        process.terminate()
    await process.wait()


async def until_ready(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    """Raises SystemExit with the end of its log if the process ends or is not ready in time."""
    deadline = time.monotonic() + START_S
    async with http_session() as session:
        while process.returncode is None and time.monotonic() < deadline:
            try:
                async with session.get(url) as answer:
                    if answer.status < 500:  # a server that wants a key is ready as well
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    raise SystemExit("\n".join(("a server did not become ready:", *_last_lines(log))))


def _last_lines(log: Path) -> list[str]:
    return log.read_text("utf-8", "replace").splitlines()[-10:]


async def statistics_of(session: aiohttp.ClientSession, server: Server) -> dict[str, Any]:
    async with session.get(f"{server.endpoint.url}/admin/api/stats") as answer:
        answer.raise_for_status()
        return await answer.json()


async def until_written(session: aiohttp.ClientSession, server: Server) -> dict[str, Any]:
    """Wait until nothing waits for the disk. Returns the statistics of the cache then."""
    while True:
        await asyncio.sleep(1.2)  # the statistics are brought up to date each second
        cache = (await statistics_of(session, server))["cache"]
        if not cache["pending_bytes"]:
            return cache


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def forget_pages(folder: Path) -> None:
    """Drop the folder's files from the page cache, so that they are read from the disk."""
    if not hasattr(os, "posix_fadvise"):
        raise SystemExit("this system cannot drop single files from its page cache")
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what was not written yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# ── the machine ──────────────────────────────────────────────────────────────────────────────


class Others:
    """What everybody but this process and those it started takes of the CPU."""

    def __init__(self) -> None:
        self._start = self._now()

    def share(self) -> float:
        """Since the beginning; 1 is one core. What a hypervisor gives to others counts as well."""
        (taken, at), (taken_then, then) = self._now(), self._start
        return max(0.0, taken - taken_then) / max(1e-9, at - then)

    @staticmethod
    def _now() -> tuple[float, float]:
        """CPU seconds of others, and the clock."""
        whole = psutil.cpu_times()
        busy = sum(whole) - whole.idle - getattr(whole, "iowait", 0.0)
        # Guests run within user time, where they are counted already.
        busy -= getattr(whole, "guest", 0.0) + getattr(whole, "guest_nice", 0.0)
        this = psutil.Process()
        ours = sum(this.cpu_times()[:4])  # with children that have ended
        for child in this.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                ours += sum(child.cpu_times()[:4])
        return busy - ours, time.perf_counter()


class Calm:
    """Measures while the machine does nothing else, as far as patience goes.

    ``patience_s`` is for the whole run: the seconds to spend on waiting for a calm machine, and on
    measuring again what was disturbed. When they are spent, things are measured as they are.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s

    async def measure(self, measure: Callable[[int], Awaitable[T]]) -> tuple[T, float]:
        """The least disturbed value, and the cores that others took meanwhile.

        ``measure`` is told how often it has been called before.
        """
        found: list[tuple[T, float]] = []
        while True:
            await self._wait()
            others, start = Others(), time.perf_counter()
            value = await measure(len(found))
            found.append((value, others.share()))
            if found[-1][1] <= CALM or self._patience_s <= 0:
                return min(found, key=lambda one: one[1])
            self._patience_s -= time.perf_counter() - start

    async def _wait(self) -> None:
        while self._patience_s > 0:
            others = Others()
            await asyncio.sleep(LISTEN_S)
            if others.share() <= CALM:
                return
            self._patience_s -= LISTEN_S


def facts() -> dict[str, Any]:
    """Versions and machine."""
    versions = {}
    for name in MEASURED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "versions": versions,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
