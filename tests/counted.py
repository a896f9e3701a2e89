"""Runs a command line of Python's in this process, which tells at SIGUSR1 what it holds.

    python tests/counted.py FILE python -m omlx serve ...

FILE gets a line of JSON each time: objects that the garbage collector knows, bytes and arrays of
MLX, threads, open files. A pool counts as one thread: how many of its bounded number it has started
tells how busy it was, not what is left behind. What is free is given back to the system first, so
that the memory of the process is what it uses. As a prefix of a command it can stand before a
server that is not to know.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def held() -> dict[str, int]:
    gc.collect()
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
    objects = gc.get_objects()
    mlx = sys.modules.get("mlx.core")
    return {
        "objects": len(objects),
        "arrays": 0 if mlx is None else sum(type(one) is mlx.array for one in objects),
        "mlx_bytes": 0 if mlx is None else mlx.get_active_memory(),
        "threads": len(_apart_from_pools(one.name for one in threading.enumerate())),
        "files": sum(1 for _ in Path("/dev/fd").iterdir()),
    }


def _apart_from_pools(names: Iterable[str]) -> list[str]:
    """``concurrent.futures`` calls the threads of a pool NAME_0, NAME_1, ..."""
    names = list(names)
    pools = {match[1] for name in names if (match := re.fullmatch(r"(.+)_\d+", name))}
    return [*(name for name in names if not re.fullmatch(r".+_\d+", name)), *pools]


def main() -> None:
    told = Path(sys.argv[1])
    module = sys.argv.index("-m")
    assert sys.argv[module + 1] == "omlx", "it counts this program"

    def tell(_number: int, _frame: FrameType | None) -> None:
        with told.open("a") as file:
            file.write(json.dumps(held()) + "\n")

    signal.signal(signal.SIGUSR1, tell)
    sys.argv = ["omlx", *sys.argv[module + 2 :]]
    from omlx.cli import main as omlx

    sys.exit(omlx())


if __name__ == "__main__":
    main()
