"""mlx-lm without a server, as a process that is told what to compute; for ``bench_throughput.py``.

    python scripts/bare.py MODEL_FOLDER CHUNK_TOKENS

A line of JSON in, a line of JSON out; times are seconds since the work began.

    {"prompts": [[1, 2], ..], "tokens": n}   a BatchGenerator loop over all of them; answers
                                             {"arrivals": [[..], ..]}, of each prompt's tokens
    {"prefill": [1, 2, ..]}                  the passes over one prompt and nothing else; answers
                                             {"seconds": s}, until its first token is known
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from omlx.blas import preload_fast_blas


def main() -> None:
    preload_fast_blas()
    folder, chunk = Path(sys.argv[1]), int(sys.argv[2])
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.models.cache import make_prompt_cache

    from omlx.engine.load import load

    model = load(folder, 1 << 40).model

    def batch(prompts: list[list[int]], tokens: int) -> list[list[float]]:
        rows = len(prompts)
        started = time.perf_counter()
        generator = BatchGenerator(
            model,
            max_tokens=tokens,
            prefill_step_size=chunk,
            prefill_batch_size=min(8, rows),
            completion_batch_size=max(8, rows),
        )
        uids = generator.insert(prompts, [tokens] * rows)
        arrivals: dict[int, list[float]] = {uid: [] for uid in uids}
        while any(len(times) < tokens for times in arrivals.values()):
            _, responses = generator.next()
            now = time.perf_counter() - started
            for response in responses:
                arrivals[response.uid].append(now)
        generator.close()
        return list(arrivals.values())

    def prefill(prompt: list[int]) -> float:
        started = time.perf_counter()
        caches = make_prompt_cache(model)
        for start in range(0, len(prompt) - 1, chunk):
            model(mx.array([prompt[start : min(start + chunk, len(prompt) - 1)]]), cache=caches)
            mx.eval([cache.state for cache in caches])
        logits = model(mx.array([prompt[-1:]]), cache=caches)
        mx.eval(mx.argmax(logits[0, -1]))
        return time.perf_counter() - started

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if "prefill" in asked:
            return {"seconds": prefill(asked["prefill"])}
        return {"arrivals": batch(asked["prompts"], asked["tokens"])}

    prefill(list(range(5, 40)))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
