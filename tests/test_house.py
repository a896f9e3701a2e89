"""The house keeps its own rules: who imports what, how long a file may be, what is documented."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "omlx"
MODULES = sorted(PACKAGE.rglob("*.py"))
LINES_MAX = 400
LONGER = {"omlx/cache/prefix_cache.py": 620}
"""One book of both tiers: its rules hold between the two, so it is read in one piece."""

MLX = {"mlx", "mlx_lm"}
MLX_ROOMS = {"engine", "models"}

PURE_ROOMS = {"cache", "core"}
IMPURE = {"aiohttp", "asyncio", "random", "threading", "time"} | MLX


def room(module: Path) -> str:
    """The first folder below ``omlx/``, or the name of a module that lies in ``omlx/`` itself."""
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_packages(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level package of each absolute import, in functions and type checks too."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield node.lineno, name.name.partition(".")[0]
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module.partition(".")[0]
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module.partition(".")[0]


def imports_of(modules: list[Path], forbidden: set[str]) -> list[str]:
    return [
        f"{module.relative_to(ROOT)}:{line} imports {package}"
        for module in modules
        for line, package in imported_packages(module.read_text("utf-8"))
        if package in forbidden
    ]


def test_the_reader_of_imports_finds_every_kind() -> None:
    source = (
        "import mlx.core as mx\n"
        "from mlx_lm.models import cache\n"
        "def f():\n    import time\n"
        "from . import asyncio\n"
        "importlib.import_module('random.x')\n"
        "import_module('threading')\n"
        "__import__('aiohttp')\n"
    )

    found = [package for _, package in sorted(imported_packages(source))]

    assert found == ["mlx", "mlx_lm", "time", "random", "threading", "aiohttp"]


def test_the_package_is_where_the_tests_look() -> None:
    assert PACKAGE / "kernel" / "actor.py" in MODULES


def test_only_the_engine_and_the_models_import_mlx() -> None:
    others = [module for module in MODULES if room(module) not in MLX_ROOMS]

    assert not imports_of(others, MLX)


def test_decisions_see_no_clock_no_loop_no_array() -> None:
    pure = [module for module in MODULES if room(module) in PURE_ROOMS]

    assert not imports_of(pure, IMPURE)


def test_each_layer_imports_only_those_below_it() -> None:
    # In a process of its own: it turns off the loggers of the process it runs in.
    script = (
        "import sys; from importlinter.cli import lint_imports as l; sys.exit(l(no_cache=True))"
    )
    linter = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert linter.returncode == 0, linter.stdout


def test_no_module_is_longer_than_one_sitting() -> None:
    lengths = {
        str(module.relative_to(ROOT)): len(module.read_text("utf-8").splitlines())
        for module in MODULES
    }

    assert not {n: lines for n, lines in lengths.items() if lines > LONGER.get(n, LINES_MAX)}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(module.relative_to(ROOT))
        for module in MODULES
        if not ast.get_docstring(ast.parse(module.read_text("utf-8")))
    ]

    assert not silent


@pytest.mark.skipif(
    importlib.util.find_spec("omlx.settings") is None, reason="there are no settings yet"
)
def test_every_setting_is_in_the_readme() -> None:
    fields = importlib.import_module("omlx.settings").Settings.model_fields
    readme = (ROOT / "README.md").read_text("utf-8")

    missing = [name for name in fields if f"`{name}`" not in readme]

    assert not missing
