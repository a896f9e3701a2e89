"""Serves random requests for as long as you like, and checks every answer against no cache.

    python scripts/soak.py [--seconds 600] [--seed 1] [--hot-blocks 4]

Tiny models, made here; prompts share random prefixes, some requests have several choices, some
are cancelled, and the hot tier has room for a few blocks. Lives in RAM alone and lives with files,
which outlast a restart, take turns. After every step the bytes that are stored must be the bytes
that the books say. Stops at the first difference, with the seed that shows it again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

REQUESTS = 40
"""Of one life."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hot-blocks", type=int, default=4)
    options = parser.parse_args()

    from omlx.engine.load import load
    from tests import tiny
    from tests.engine.soaking import Soak

    until = time.monotonic() + options.seconds
    seed, totals = options.seed, [0, 0, 0, 0]
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        models = {n: load(tiny.build(n, folder / n), 1 << 30) for n in ("llama", "gemma3")}
        while time.monotonic() < until:
            name, cold, ahead = list(models)[seed % 2], seed // 2 % 2, bool(seed // 4 % 2)
            files = folder / f"blocks-{seed}" if cold else None
            soak = Soak(models[name], seed, files, options.hot_blocks, ahead)
            try:
                soak.run(REQUESTS)
                if cold:
                    soak.begin_life()
                    soak.run(REQUESTS)
            except AssertionError:
                print(f"FAULT with --seed {seed}: {name}, files {bool(cold)}, ahead {ahead}")
                raise
            found = (soak.steps, soak.checked, soak.cancelled, soak.reused_tokens)
            totals = [a + b for a, b in zip(totals, found, strict=True)]
            seed += 1
    steps, checked, cancelled, reused = totals
    print(
        f"{seed - options.seed} lives, {steps} steps, {checked} answers equal to no cache "
        f"({cancelled} cancelled), {reused} tokens reused"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
