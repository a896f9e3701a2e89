"""MLX, asked in a process of its own: a crash, a hang or a missing library there costs us a line.

The child writes one line of JSON for each part that it found out, in this order, and flushes it;
so what it found before it died is known. It gets the fast BLAS as the server would get it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from omlx import blas
from omlx.doctor.facts import Backend, Mlx, Sketch, Speeds

PARTS = ("backend", "speeds", "sketch")


# ── the parent's side ────────────────────────────────────────────────────────────────────────


def ask_mlx(model: Path | None, memory_bytes: int, timeout_s: float) -> Mlx:
    """Start the child and wait. ``model`` None: no sketch. ``memory_bytes``: the budget on CPU."""
    environment = dict(os.environ)
    library = blas.library_to_preload()
    if library is not None:
        before = environment.get("LD_PRELOAD")
        environment["LD_PRELOAD"] = f"{library}:{before}" if before else str(library)
    arguments = [str(memory_bytes), *([] if model is None else [str(model)])]
    try:
        ran = subprocess.run(
            [sys.executable, "-m", __name__, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        output, ending, late = ran.stdout, _ending(ran.returncode, ran.stderr), False
    except subprocess.TimeoutExpired as stopped:
        output, ending, late = stopped.stdout or b"", f"no answer within {timeout_s:.0f} s", True
    except OSError as error:
        output, ending, late = b"", f"it could not be started: {error.strerror}", False
    wanted = PARTS if model is not None else PARTS[:2]
    return replace(understand(output.decode(errors="replace"), ending, wanted), late=late)


def understand(output: str, ending: str, wanted: tuple[str, ...] = PARTS) -> Mlx:
    """What the child's output says; for each part of ``wanted`` that it lacks, an error."""
    found: dict[str, Any] = {}
    errors: dict[str, str] = {}
    kinds = get_type_hints(Mlx)
    for line in output.splitlines():
        try:
            entry = json.loads(line)
            part, error = entry["part"], entry.get("error")
            if error is not None:
                errors[part] = str(error)
            else:
                found[part] = TypeAdapter(get_args(kinds[part])[0]).validate_python(entry["value"])
        except (ValueError, KeyError, TypeError, ValidationError):
            continue  # something else that a library printed
    for part in wanted:
        if part not in found:
            errors.setdefault(part, errors.get("backend") or ending)
    return Mlx(found.get("backend"), found.get("speeds"), found.get("sketch"), errors)


def _ending(code: int, stderr: bytes) -> str:
    if code < 0:
        try:
            return f"it was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"it was ended by signal {-code}"
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else f"it ended with {code}"


# ── the child's side ─────────────────────────────────────────────────────────────────────────


def main(arguments: list[str]) -> None:
    try:
        from omlx.engine import load, measure
    except ImportError as error:
        _say("backend", error=blas.explain_import_error(error) or f"MLX can't be imported: {error}")
        return
    name = load.backend_name()
    _say(
        "backend",
        Backend(
            name,
            measure.device_name(),
            metadata.version("mlx"),
            load.working_set_bytes(),
            blas.describe_blas(),
            sys.platform.startswith("linux") and name == "cpu" and blas.loaded_fast_blas() is None,
        ),
    )
    try:
        speed = measure.measure()
    except (RuntimeError, ValueError) as error:  # what MLX raises, as for want of memory
        _say("speeds", error=str(error))
    else:
        _say(
            "speeds",
            Speeds(speed.matmul_gflops, speed.matmul_threads, speed.read_bytes_per_s),
        )
    if len(arguments) > 1:
        _sketch(Path(arguments[1]), int(arguments[0]))


def _sketch(path: Path, memory_bytes: int) -> None:
    from omlx.engine.kv import UnsupportedModel
    from omlx.engine.load import sketch

    try:
        found = sketch(path, memory_bytes)
    except (UnsupportedModel, ValueError, FileNotFoundError) as error:
        _say("sketch", error=str(error))
        return
    value = Sketch(
        found.cache, found.max_context, found.weight_bytes, found.weight_dtype, found.notes
    )
    _say("sketch", value)


def _say(part: str, value: object = None, error: str | None = None) -> None:
    plain = None if value is None else TypeAdapter(type(value)).dump_python(value, mode="json")
    print(json.dumps({"part": part, "value": plain, "error": error}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
