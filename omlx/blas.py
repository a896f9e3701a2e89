"""Which linear algebra MLX will use here, and a faster one put in front of it on a Linux CPU.

MLX's CPU wheel for Linux brings the reference BLAS, on which prefill is some thirty times slower
than on OpenBLAS. The dynamic loader takes a symbol from the first library that has it, so a fast
BLAS named in LD_PRELOAD wins; but the loader reads that only when a process starts. Hence the one
hard idea here: find one, set LD_PRELOAD, and replace this process by itself, once.

    OMLX_NO_BLAS_PRELOAD=1    never do this

Imports nothing of MLX, so that it can run before it and say why it cannot be imported.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Literal

OPT_OUT = "OMLX_NO_BLAS_PRELOAD"
_MARKER = "_OMLX_BLAS_PRELOADED"

Backend = Literal["metal", "cuda", "cpu"]

_DISTRIBUTIONS: tuple[tuple[str, Backend], ...] = (
    ("mlx-metal", "metal"),
    ("mlx-cuda-13", "cuda"),
    ("mlx-cuda-12", "cuda"),
    ("mlx-cpu", "cpu"),
)
_NO_BACKEND = (
    "MLX has no backend here. On Linux install one: pip install 'omlx[cpu]' or 'omlx[cuda13]'."
)
_ADVICE = "apt install libopenblas0-pthread"

# The first that exists is taken: threaded builds come before those that may be serial.
_PLACES = (
    "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib/aarch64-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib/x86_64-linux-gnu/openblas-openmp/libopenblas.so.0",
    "/usr/lib/aarch64-linux-gnu/openblas-openmp/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib64/libopenblaso.so.0",
    "{prefix}/lib/libmkl_rt.so.2",
    "{prefix}/lib/libopenblas.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib/libopenblas.so.0",
    "/usr/lib/x86_64-linux-gnu/libopenblas.so.0",
    "/usr/lib/aarch64-linux-gnu/libopenblas.so.0",
    "/usr/local/lib/libopenblas.so.0",
)

# NumPy's own copy ("libscipy_openblas64_") is none of these: it renames its symbols.
_FAST = re.compile(r"/(libopenblas|libmkl_rt|libblis|libflexiblas)[^/]*\.so[^/]*$")
_OPENBLAS_VERSION = re.compile(r"libopenblas\w*-r(\d+(\.\d+)+)\.so")


# ── the backend ──────────────────────────────────────────────────────────────
def backend() -> Backend | None:
    """What the installed packages make MLX run on; None when nothing does."""
    for distribution, name in _DISTRIBUTIONS:
        if _is_installed(distribution):
            return name
    # Built from source, MLX carries its library itself, and does not say for what.
    if sys.platform == "darwin":
        return "metal" if _has_library() else None
    return "cpu" if _has_library() else None


def backend_error() -> str | None:
    """The sentence to print when MLX cannot be imported for want of a backend; else None."""
    if not sys.platform.startswith("linux") or backend() is not None:
        return None
    return _NO_BACKEND


def explain_import_error(error: ImportError) -> str | None:
    """The sentence to print for a failed import of ``mlx.core``; None: it is another failure."""
    if sys.platform.startswith("linux") and "libmlx" in str(error):
        return _NO_BACKEND
    if "GLIBC" in str(error):
        return f"MLX needs a newer C library than this system has (glibc 2.35): {error}"
    return backend_error()


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _has_library() -> bool:
    # find_spec of a top-level name looks at paths and imports nothing.
    spec = util.find_spec("mlx")
    roots = spec.submodule_search_locations if spec is not None else None
    return any(Path(root, "lib").glob("libmlx.*") for root in roots or ())


# ── the library in front ─────────────────────────────────────────────────────
def preload_fast_blas() -> None:
    """Start this process again with a fast BLAS in front, when that helps. Call it first of all.

    Returns, having changed nothing, when MLX does not compute on a Linux CPU, a fast BLAS is
    loaded already, none is installed, or ``OMLX_NO_BLAS_PRELOAD`` is set to anything but 0.
    Otherwise does not return: the program runs again from its start, with the same arguments,
    process id and open standard streams. In that second life this call takes its traces out of
    the environment, so that child processes start as the user's own shell would start them.
    """
    if _MARKER in os.environ:
        _forget_preload(os.environ.pop(_MARKER))
        return
    library = library_to_preload()
    if library is None or not sys.executable:
        return
    before = os.environ.get("LD_PRELOAD")
    preload = f"{library}:{before}" if before else str(library)
    environment = {**os.environ, "LD_PRELOAD": preload, _MARKER: str(library)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def library_to_preload() -> Path | None:
    """The library that ``preload_fast_blas`` would put in front now. Changes nothing."""
    if not sys.platform.startswith("linux") or os.environ.get(OPT_OUT, "0") not in ("", "0"):
        return None
    if backend() != "cpu" or loaded_fast_blas() is not None:
        return None
    return find_fast_blas()


def find_fast_blas() -> Path | None:
    """The first fast BLAS in the usual places of Debian, Fedora, Arch, conda and PyPI's mkl."""
    for place in _PLACES:
        library = Path(place.format(prefix=sys.prefix))
        # A space or colon ends a name in LD_PRELOAD, and cannot be quoted.
        if library.is_file() and not set(" :") & set(str(library)):
            return library
    return None


def loaded_fast_blas() -> Path | None:
    """The fast BLAS that this process has mapped, by its real name."""
    for path in _mapped_files():
        if _FAST.search(path) and "numpy.libs/" not in path and "scipy.libs/" not in path:
            return Path(path)
    return None


def describe_blas() -> str:
    """Which BLAS MLX uses, and what to do about a slow one: a phrase for the start-up lines."""
    match backend():
        case "metal":
            return "Accelerate"
        case "cuda":
            return "not used: CUDA"
        case None:
            return "none: no MLX backend"
        case "cpu":
            pass
    if sys.platform == "darwin":
        return "Accelerate"
    library = loaded_fast_blas()
    if library is not None:
        return f"{_name(library)} (preloaded)"
    slow = "reference BLAS: prefill is 30x slower"
    if find_fast_blas() is None:
        return f"{slow}; {_ADVICE}"
    if os.environ.get(OPT_OUT, "0") not in ("", "0"):
        return f"{slow}; unset {OPT_OUT}"
    return f"{slow}; {find_fast_blas()} is installed and was not loaded"


def _name(library: Path) -> str:
    version = _OPENBLAS_VERSION.search(library.name)
    if version is not None:
        return f"OpenBLAS {version[1]}"
    for part, name in (("openblas", "OpenBLAS"), ("mkl", "MKL"), ("blis", "BLIS")):
        if part in library.name:
            return name
    return "FlexiBLAS"


def _mapped_files() -> Iterator[str]:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    seen: set[str] = set()
    for line in maps.splitlines():
        # address permissions offset device inode path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] not in seen:
            seen.add(fields[5])
            yield fields[5]


def _forget_preload(library: str) -> None:
    others = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name != library]
    if others and others != [""]:
        os.environ["LD_PRELOAD"] = ":".join(others)
    else:
        os.environ.pop("LD_PRELOAD", None)
