"""A fast BLAS is put in front once, only where it helps, and the start-up line says which."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from omlx import blas

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The distributions that exist in this test; empty at first. MLX itself has no library."""
    names: set[str] = set()

    def version(name: str) -> str:
        if name in names:
            return "1"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(blas.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv(blas.OPT_OUT, raising=False)
    return names


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    files: list[str] = []
    monkeypatch.setattr(blas, "_mapped_files", lambda: iter(files))
    return files


@pytest.fixture
def fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library = tmp_path / "libopenblas.so.0"
    library.touch()
    monkeypatch.setattr(blas, "_PLACES", ("/nowhere/libopenblas.so.0", str(library)))
    return library


@pytest.mark.parametrize(
    ("distributions", "expected"),
    [
        ({"mlx-cpu"}, "cpu"),
        ({"mlx-cuda-12"}, "cuda"),
        ({"mlx-cuda-13", "mlx-cpu"}, "cuda"),
        ({"mlx-metal"}, "metal"),
        (set[str](), None),
    ],
)
def test_the_backend_is_what_is_installed(
    distributions: set[str], expected: str | None, installed: set[str]
) -> None:
    installed |= distributions

    assert blas.backend() == expected


def test_no_backend_on_linux_is_one_sentence_that_says_what_to_install(
    installed: set[str],
) -> None:
    sentence = (
        "MLX has no backend here. On Linux install one: pip install 'omlx[cpu]' or 'omlx[cuda13]'."
    )

    assert blas.backend_error() == sentence
    assert (
        blas.explain_import_error(ImportError("libmlx.so: cannot open shared object")) == sentence
    )

    installed.add("mlx-cpu")

    assert blas.backend_error() is None
    assert blas.explain_import_error(ImportError("No module named 'yaml'")) is None


def test_a_fast_blas_goes_in_front_on_the_cpu_only(
    installed: set[str], mapped: list[str], fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.add("mlx-cpu")
    assert blas.library_to_preload() == fast

    monkeypatch.setenv(blas.OPT_OUT, "1")
    assert blas.library_to_preload() is None
    monkeypatch.setenv(blas.OPT_OUT, "0")
    assert blas.library_to_preload() == fast

    mapped.append("/usr/lib/libopenblasp-r0.3.21.so")
    assert blas.library_to_preload() is None
    mapped.clear()

    installed.add("mlx-cuda-13")
    assert blas.library_to_preload() is None
    installed.clear()
    assert blas.library_to_preload() is None


def test_numpys_own_copy_is_not_what_mlx_uses(mapped: list[str]) -> None:
    mapped.append("/venv/site-packages/numpy.libs/libscipy_openblas64_-32a4b2a6.so")
    mapped.append("/venv/site-packages/numpy.libs/libopenblas64_p-r0-7a851222.3.23.so")
    mapped.append("/venv/site-packages/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0")

    assert blas.loaded_fast_blas() is None


def test_the_start_up_line_names_the_library_or_the_remedy(
    installed: set[str], mapped: list[str], fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.add("mlx-cpu")
    assert "was not loaded" in blas.describe_blas()

    monkeypatch.setenv(blas.OPT_OUT, "1")
    assert blas.describe_blas().endswith("unset OMLX_NO_BLAS_PRELOAD")

    fast.unlink()
    assert blas.describe_blas() == (
        "reference BLAS: prefill is 30x slower; apt install libopenblas0-pthread"
    )

    mapped.append("/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so")
    assert blas.describe_blas() == "OpenBLAS 0.3.21 (preloaded)"
    mapped[:] = ["/venv/lib/libmkl_rt.so.2"]
    assert blas.describe_blas() == "MKL (preloaded)"

    installed.add("mlx-cuda-13")
    assert blas.describe_blas() == "not used: CUDA"
    installed.add("mlx-metal")
    assert blas.describe_blas() == "Accelerate"


PROGRAM = """
import os, sys
from pathlib import Path
from omlx import blas

blas.backend = lambda: "cpu"
blas.find_fast_blas = lambda: Path(sys.argv[1])
print("life", flush=True)
blas.preload_fast_blas()
left = [name for name in os.environ if "BLAS_PRELOADED" in name]
print(sys.argv[2:], os.environ.get("LD_PRELOAD"), left)
"""


@linux_only
@pytest.mark.parametrize("before", [None, "/nowhere/liba.so"])
def test_the_process_starts_again_once_and_leaves_no_trace(
    before: str | None, tmp_path: Path
) -> None:
    # A library that cannot be loaded: the loader warns and goes on, and so must we, without a loop.
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    library = tmp_path / "libopenblas.so.0"
    library.write_bytes(b"no library")
    kept = {name: value for name, value in os.environ.items() if "PRELOAD" not in name}
    root = str(Path(blas.__file__).parents[1])
    environment = kept | {"PYTHONPATH": root} | ({"LD_PRELOAD": before} if before else {})

    done = subprocess.run(
        [sys.executable, str(program), str(library), "serve", "--port", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert done.stdout.splitlines() == ["life", "life", f"['serve', '--port', '1'] {before} []"]
    assert str(library) in done.stderr, "the loader was asked to put it in front"
