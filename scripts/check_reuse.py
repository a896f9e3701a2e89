"""Is a warm run the cold run? Compares the logits of the first token, on any model.

    python scripts/check_reuse.py MODEL_FOLDER [--tokens 1500] [--json FILE]

A prompt is run cold, from RAM and from files, at lengths around every block and window edge; then
a second prompt that leaves the first one in the middle of a block. Greedy ids of 8 tokens must be
equal, and no first logit may differ by more than 1e-3. Exit code 1 if one does.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omlx import blas

NUM_TOKENS = 8
TOLERANCE = 1e-3


def main() -> int:
    blas.preload_fast_blas()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    from in_process import InProcess

    bench = InProcess(arguments.model, block_size=arguments.block_size, watch_logits=True)
    rng = random.Random(7)
    long = [rng.randrange(10, min(bench.vocab_size, 30000)) for _ in range(arguments.tokens)]
    rows: list[dict[str, Any]] = []
    worst = 0.0

    def compare(label: str, prompt: Sequence[int], expected_cached: int | None) -> None:
        nonlocal worst
        bench.clear()
        cold = bench.run(prompt, NUM_TOKENS, caching=False)
        if expected_cached is not None:
            bench.run(long, 1)
        else:
            bench.run(prompt, 1)
        for tier in ("ram", "ssd"):
            if tier == "ssd":
                bench.forget_ram()
            warm = bench.run(prompt, NUM_TOKENS, keep=False)
            difference = bench.max_difference(cold.logits, warm.logits)
            worst = max(worst, difference)
            wanted = len(prompt) - 1 if expected_cached is None else expected_cached
            good = warm.tokens == cold.tokens and difference <= TOLERANCE and warm.cached == wanted
            rows.append(
                {
                    "case": label,
                    "tier": tier,
                    "prompt": len(prompt),
                    "cached": warm.cached,
                    "wanted": wanted,
                    "max_logit_difference": difference,
                    "same_tokens": warm.tokens == cold.tokens,
                    "ok": good,
                }
            )
            print(json.dumps(rows[-1]))

    size = arguments.block_size
    for length in (2, size - 1, size, size + 1, 2 * size + 3, arguments.tokens):
        compare(f"repeat {length}", long[:length], None)
    for split in (size // 3, size, size + 70, arguments.tokens - 5):
        other = [*long[:split], *(rng.randrange(10, 30000) for _ in range(60))]
        if other[split] == long[split]:
            other[split] += 1
        compare(f"diverge at {split}", other, split)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    bad = [row for row in rows if not row["ok"]]
    print(f"{len(rows)} comparisons, {len(bad)} bad, largest logit difference {worst:.2e}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
