"""Predicts what one long completion takes in memory, computes it, and compares.

    python scripts/check_memory.py [--tokens 20000] [--prompt 1000] [--rows 1] [--model FOLDER]

Without ``--model``: tiny models of three kinds, made here, with a context that is long enough. What
is predicted is printed before anything is computed: the caches of the rows at each length, and the
most that is needed at once. Exits with 1 when that was exceeded, when caches took less than half
of what was predicted, or when the memory does not come back.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from omlx.core.memory import RowMemory
    from omlx.engine.load import LoadedModel

TINY = ("llama", "gemma3", "qwen3_5")
LOOKS = 5
PLENTY = 1 << 40
MB = 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=20_000, help="to generate")
    parser.add_argument("--prompt", type=int, default=1_000, help="tokens of the prompt")
    parser.add_argument("--rows", type=int, default=1, help="completions at once")
    parser.add_argument("--model", type=Path, help="a folder")
    options = parser.parse_args()

    from omlx.engine.load import load

    good = True
    with tempfile.TemporaryDirectory() as home:
        folders = [options.model] if options.model else list(tiny_models(Path(home), options))
        for folder in folders:
            model = load(folder, PLENTY)
            good &= check(folder.name, model, options.prompt, options.tokens, options.rows)
    return 0 if good else 1


def tiny_models(home: Path, options: argparse.Namespace) -> Iterator[Path]:
    from tests import tiny

    for name in TINY:
        folder = tiny.build(name, home / name)
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config", config)
        text["max_position_embeddings"] = options.prompt + options.tokens + 1
        (folder / "config.json").write_text(json.dumps(config))
        yield folder


def check(name: str, model: LoadedModel, num_prompt: int, num_tokens: int, rows: int) -> bool:
    import mlx.core as mx

    from omlx.core.limits import SchedulerLimits
    from omlx.core.memory import RowMemory
    from omlx.core.scheduler import Scheduler
    from omlx.core.sequence import Request
    from omlx.engine.measure import measure_chunk
    from omlx.engine.step import Engine

    chunk = 128
    row = RowMemory.of(
        model.cache, chunk, model.vocab_size, measure_chunk(model.model, chunk, PLENTY)
    )
    ahead = model.backend != "cpu"
    engine = Engine(model.model, model.cache, ahead=ahead)
    core = Scheduler(
        SchedulerLimits(
            max_running=rows,
            max_queued=rows,
            max_context=PLENTY,
            chunk_tokens=chunk,
            block_size=256,
            caching=False,
            feeds_ahead=ahead,
        ),
        eos_tokens=frozenset(),
        hidden_tokens=frozenset(),
        detokenizer=lambda: model.tokenizer.detokenizer,
    )
    looks = [num_prompt + num_tokens * part // LOOKS for part in range(1, LOOKS + 1)]
    say_prediction(name, row, looks, num_prompt, rows)
    for index in range(rows):
        prompt = tuple(20 + (index + token) % 150 for token in range(num_prompt))
        core.submit(Request(str(index), prompt, num_tokens), 0.0)
    process = psutil.Process()
    before, rss = mx.get_active_memory(), process.memory_info().rss
    mx.reset_peak_memory()
    good, longest = True, 0
    columns = (
        "tokens",
        "caches, MB",
        "of predicted",
        "most at once, MB",
        "of predicted",
        "RSS, MB",
    )
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    while True:
        core.settle_work(0.0)
        core.close_ended(0.0)
        plan = core.plan()
        if plan is None:
            break
        core.apply(plan, engine.run(plan).result, 0.0)
        core.take_events()
        longest = max((s.num_tokens for s in core.sequences()), default=longest)
        while looks and longest >= looks[0]:
            at = looks.pop(0)
            if not all(s.num_generated for s in core.sequences()):
                break  # a row is still on its way
            kept, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
            caches, need = row.caches(rows, at), row.need([at] * rows, num_prompt)
            grown = process.memory_info().rss - rss
            print(
                f"| {at:,} | {kept / MB:.1f} | {kept / caches:.2f} | {peak / MB:.1f} "
                f"| {peak / need:.2f} | {grown / MB:+.1f} |",
                flush=True,
            )
            good &= peak <= need and kept >= caches / 2
    left = mx.get_active_memory() - before
    print(f"\nleft when it has ended: {left / MB:.2f} MB\n")
    return good and not looks and left < 1.0 * MB


def say_prediction(name: str, row: RowMemory, looks: list[int], num_prompt: int, rows: int) -> None:
    print(f"## {name}: {rows} of {row.token_bytes:,} bytes a token", end="")
    print(f", {row.state_bytes:,} of states, {len(row.windows)} kinds of windows")
    print(f"measured: {row.peak.token_bytes:,.0f} bytes for each token of a chunk,", end=" ")
    print(f"{row.peak.pair_bytes:.1f} more for each one before it; predicted:")
    for at in looks:
        caches, need = row.caches(rows, at), row.need([at] * rows, num_prompt)
        print(f"    {at:,} tokens: caches {caches / MB:.1f} MB, at most {need / MB:.1f} MB at once")


if __name__ == "__main__":
    sys.exit(main())
