"""What the probes found out. Plain values, so that any machine can be written down in a test."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from omlx.cache.hybrid_cache import ModelCacheConfig


@dataclass(frozen=True, slots=True)
class Pin:
    """A package that must have certain versions. ``found`` None: not installed."""

    name: str
    wanted: str
    found: str | None
    fits: bool


@dataclass(frozen=True, slots=True)
class Machine:
    system: str
    """Linux, Darwin, ..."""
    architecture: str
    python: tuple[int, int, int]
    glibc: tuple[int, int] | None
    cores: int
    load: float
    """Mean number of processes that ran or wanted to, of the last minute."""
    ram_bytes: int
    available_bytes: int
    cgroup_bytes: int | None
    open_files_max: int
    driver: tuple[int, ...] | None = None
    """Version of NVIDIA's driver; None where there is none."""

    @property
    def is_busy(self) -> bool:
        """Whether others take so much that a measured speed says little."""
        return self.load > self.cores


@dataclass(frozen=True, slots=True)
class Packages:
    pins: tuple[Pin, ...]
    backends: tuple[str, ...]
    """Installed distributions that carry a backend of MLX."""
    backend_error: str | None
    """Why there can be no MLX here; None when nothing speaks against it."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What MLX says of itself once it is imported."""

    name: str
    """metal, cuda or cpu"""
    device: str
    mlx_version: str
    working_set_bytes: int | None
    blas: str
    blas_is_slow: bool


@dataclass(frozen=True, slots=True)
class Speeds:
    matmul_gflops: float
    matmul_threads: float
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Sketch:
    """The model as it would be served, without its weights."""

    cache: ModelCacheConfig
    max_context: int
    weight_bytes: int
    weight_dtype: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mlx:
    """Each part is None when it could not be found out; ``errors`` says why, by part."""

    backend: Backend | None = None
    speeds: Speeds | None = None
    sketch: Sketch | None = None
    errors: dict[str, str] = field(default_factory=dict)
    late: bool = False
    """It was stopped before it had said everything, so what is missing means little."""


MEASURED_BYTES = 64_000_000
"""Written and read to know how fast a disk is."""

LEFT_FREE_BYTES = 4 * MEASURED_BYTES
"""On a volume with less room than this nothing is written."""


@dataclass(frozen=True, slots=True)
class Home:
    """``$OMLX_HOME``, where settings and statistics are saved."""

    path: Path
    exists: bool
    writable: bool
    """It, or the folder that it would be made in."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The cache folder, or, where it is not there yet, the folder it would be made in."""

    root: Path
    exists: bool
    measured_in: Path
    writable: bool
    mode: int | None
    """Permission bits of ``root``; None when it does not exist."""
    filesystem: str
    volume_bytes: int
    free_bytes: int
    holder: int | None = None
    """Process that has the lock; 0 when its number can't be read; None when nobody has."""
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    error: str = ""
    """What went wrong while measuring, or looking."""


PortState = Literal["free", "taken", "denied", "no_such_address"]


@dataclass(frozen=True, slots=True)
class Port:
    host: str
    port: int
    state: PortState
    answer: Literal["", "omlx", "http", "silence"] = ""
    """Who is there, when it is taken."""
    status: str = ""
    """What an omlx says of itself, or the other server's name."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """``path`` None: it can't be found; ``fault`` says why. ``to_fetch``: from where, if absent."""

    name: str
    path: Path | None
    to_fetch: str = ""
    fault: str = ""
    free_bytes: int = 0
    """On the volume of the model directory."""
