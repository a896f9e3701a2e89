"""Kills a server again and again, and checks every answer of every life against no cache at all.

    python scripts/crash.py [--kills 100] [--seed 0] [--damage] [--model DIR]

The server is a real process with a cache directory of its own, a few blocks of RAM, and less room
on disk than its clients would fill, so that writes and evictions never end. SIGKILL comes while it
starts, loads, serves, writes or stops; with --damage files are cut, zeroed, flipped and mixed up
between two lives. Exits 1 at anything wrong.

The model is a tiny hybrid, made here; for another one give sizes that suit its blocks.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TOPICS = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--damage", action="store_true", help="spoil files between two lives")
    parser.add_argument("--model", type=Path, help="instead of a tiny hybrid")
    parser.add_argument("--ssd-bytes", type=int, default=1_000_000)
    parser.add_argument("--hot-bytes", type=int, default=200_000)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    from tests import tiny
    from tests.crashing import Crashes, make_chats

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="omlx-crash-") as folder:
        home = Path(folder)
        model = options.model or tiny.build("qwen3_5", home / "models")
        chats = make_chats(model, home / "oracle", options.seed, TOPICS)
        print(f"{len(chats)} chats were answered without a cache", flush=True)
        crashes = Crashes(
            model,
            home / "served",
            chats,
            seed=options.seed,
            ssd_bytes=options.ssd_bytes,
            hot_bytes=options.hot_bytes,
            damage=options.damage,
        )
        try:
            crashes.kill_many(options.kills)
        except KeyboardInterrupt:
            print("interrupted: what was seen so far")

    tally = crashes.tally
    for what in tally.wrong[:20]:
        print(f"WRONG: {what}")
    rows = {
        "kills": tally.kills.total(),
        **{f"  {moment.value}": count for moment, count in tally.kills.most_common()},
        "half-written files left by kills": tally.torn,
        "seconds to start, median and most": (
            f"{statistics.median(tally.starts_s):.1f}, {max(tally.starts_s):.1f}"
        ),
        "answers": tally.answers,
        "  streamed": tally.streamed,
        "  with tokens from the cache": tally.from_cache,
        "tokens of prompts from the cache": f"{tally.cached_tokens} of {tally.prompt_tokens}",
        "answers cut off by a kill": tally.interrupted,
        "files found at starts": tally.files_found,
        "files lost at starts": tally.files_lost,
        "files damaged by us": tally.damaged,
        "files that servers called corrupt": tally.corrupt,
        "files removed for room": tally.evicted,
        "most bytes on disk": f"{tally.most_bytes} of {options.ssd_bytes}",
        "wrong": len(tally.wrong),
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")
    verdict = "FAILED" if tally.wrong else "passed"
    print(
        f"{verdict}: {tally.kills.total()} kills with seed {options.seed}, {tally.answers} answers,"
        f" {len(tally.wrong)} wrong, {time.monotonic() - began:.0f} s"
    )
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
