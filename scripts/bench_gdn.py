"""Time Gated DeltaNet prefill: mlx-lm's loop over tokens against ``omlx``.

On CPU that goes in chunks, on CUDA a kernel goes token by token.

    python scripts/bench_gdn.py                         a model's shape that suits the backend
    python scripts/bench_gdn.py --shape hybrid-28m --lengths 64 512 --json times.json
    python scripts/bench_gdn.py --model path/to/model   a real one
    python scripts/bench_gdn.py --chunks 32 64 128      only one layer's rule, by chunk size

Weights are random unless --model is given. The prompt goes through the model as the server feeds
it: --step tokens at a time, evaluating the caches after each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from omlx.blas import describe_blas, preload_fast_blas

if __name__ == "__main__":
    preload_fast_blas()  # before mlx loads the slow one

import mlx.core as mx
from mlx_lm.models import cache as caches
from mlx_lm.models import gated_delta, qwen3_5
from mlx_lm.utils import load_model

from omlx.engine import gdn_chunked

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 248320,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "hybrid-28m": {
        "hidden_size": 320,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 49152,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}
COMMON: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": True,
}

Row = dict[str, Any]


def main() -> None:
    options = _options()
    gpu = mx.default_device() == mx.Device(mx.gpu)
    shape_name = options.shape or ("qwen3.5-0.8b" if gpu else "hybrid-28m")
    dtype = getattr(mx, options.dtype or ("bfloat16" if gpu else "float32"))
    step = options.step or (2048 if gpu else 256)
    shape = SHAPES[shape_name] | COMMON
    if options.value_heads:
        shape["linear_num_value_heads"] = options.value_heads
    # Sets what has to be set before the first matmul.
    gdn_chunked.install()
    gdn_chunked.uninstall()
    facts = {
        "device": str(mx.default_device()),
        "blas": describe_blas(),
        "mlx": metadata.version("mlx"),
        "model": options.model or shape_name,
        "value_heads": shape["linear_num_value_heads"],
        "dtype": str(dtype),
        "step": step,
    }
    print("  ".join(f"{name}={value}" for name, value in facts.items()), flush=True)
    result: dict[str, Any] = {"facts": facts}
    result["layer"] = time_layer(shape, dtype, options)
    if not options.chunks:
        model = load_model(Path(options.model))[0] if options.model else make_model(shape, dtype)
        if options.model and not gpu:
            model.set_dtype(mx.float32)
        result["model"] = time_model(model, step, options)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--model", help="a model directory, instead of a shape")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 2048, 8192])
    parser.add_argument("--chunks", type=int, nargs="+", help="chunk sizes to compare")
    parser.add_argument("--step", type=int, help="tokens a forward pass")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--value-heads", type=int)
    parser.add_argument("--loop-max", type=int, default=1 << 30, help="longest prompt for the loop")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", help="file to write")
    return parser.parse_args()


# ── one layer ────────────────────────────────────────────────────────────────
def time_layer(shape: Row, dtype: mx.Dtype, options: argparse.Namespace) -> list[Row]:
    """Time the rule alone, as one layer of one prompt applies it."""
    rows: list[Row] = []
    chunks = options.chunks or [None]
    names = ["loop ms", *(f"chunk {size} ms" if size else "omlx ms" for size in chunks)]
    _print_row("one layer: tokens", *names, "times faster", "y error", "state error")
    for length in options.lengths:
        q, k, v, log_g, beta, state = _draw(length, shape, dtype)
        g = mx.exp(log_g)
        mx.eval(g)

        def loop(args: Any = (q, k, v, g, beta, state)) -> Any:
            return gated_delta.gated_delta_ops(*args)

        slow = _seconds(loop, 1) if length <= options.loop_max else None

        def chunked(size: int | None, args: Any = (q, k, v, log_g, beta, state)) -> Any:
            return gdn_chunked.delta_rule(*args, chunk=size)

        fast = [_seconds(partial(chunked, size), options.repeat) for size in chunks]
        errors = _errors(loop(), chunked(chunks[-1])) if slow else (None, None)
        rows.append(
            {
                "tokens": length,
                "loop_ms": _round(slow, 1e3),
                "omlx_ms": {str(c): _round(s, 1e3) for c, s in zip(chunks, fast, strict=True)},
                "times": _round(slow and slow / min(fast)),
                "y_error": errors[0],
                "state_error": errors[1],
            }
        )
        row = rows[-1]
        _print_row(
            length, row["loop_ms"], *row["omlx_ms"].values(), row["times"], *map(_short, errors)
        )
    return rows


def _draw(length: int, shape: Row, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    mx.random.seed(length)
    key_heads, heads = shape["linear_num_key_heads"], shape["linear_num_value_heads"]
    dim = shape["linear_key_head_dim"]
    q, k = gated_delta.normalize_qk(
        mx.random.normal((1, length, key_heads, dim)),
        mx.random.normal((1, length, key_heads, dim)),
        inv_scale=dim**-0.5,
        eps=1e-6,
    )
    v = mx.random.normal((1, length, heads, shape["linear_value_head_dim"]))
    log_g = -mx.exp(2 * mx.random.normal((1, length, heads)) - 2)
    beta = mx.sigmoid(mx.random.normal((1, length, heads)))
    state = mx.random.normal((1, heads, shape["linear_value_head_dim"], dim))
    arrays = (q.astype(dtype), k.astype(dtype), v.astype(dtype), log_g, beta, state)
    mx.eval(arrays)
    return arrays


def _errors(expected: Any, found: Any) -> tuple[float, ...]:
    """Largest difference over largest value, of y and of the state."""

    def error(one: mx.array, other: mx.array) -> float:
        one, other = one.astype(mx.float32), other.astype(mx.float32)
        return float(mx.abs(one - other).max() / mx.abs(one).max())

    return tuple(error(one, other) for one, other in zip(expected, found, strict=True))


# ── a model ──────────────────────────────────────────────────────────────────
def make_model(shape: Row, dtype: mx.Dtype) -> Any:
    mx.random.seed(1)
    model = qwen3_5.TextModel(qwen3_5.TextModelArgs.from_dict(shape))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def time_model(model: Any, step: int, options: argparse.Namespace) -> list[Row]:
    """Time the prefill of prompts; both ways are warmed up with the first and last pass's shape."""
    rows: list[Row] = []
    _print_row("model: tokens", "loop s", "omlx s", "loop tok/s", "omlx tok/s", "times faster")
    for length in options.lengths:
        tokens = mx.random.randint(0, 40000, (1, length))
        mx.eval(tokens)

        def prefill(tokens: mx.array = tokens) -> Any:
            cache = caches.make_prompt_cache(model)
            for start in range(0, tokens.shape[1], step):
                model(tokens[:, start : start + step], cache=cache)
                mx.eval([layer.state for layer in cache])

        # One pass has warmed the loop up: all are alike.
        slow = _seconds(prefill, 1, length <= step) if length <= options.loop_max else None
        gdn_chunked.install()
        fast = _seconds(prefill, options.repeat)
        gdn_chunked.uninstall()
        rows.append(
            {
                "tokens": length,
                "loop_s": _round(slow),
                "omlx_s": _round(fast),
                "loop_tok_s": _round(slow and length / slow),
                "omlx_tok_s": _round(length / fast),
                "times": _round(slow and slow / fast),
            }
        )
        _print_row(*rows[-1].values())
    return rows


def _seconds(work: Callable[[], Any], repeat: int, warm: bool = True) -> float:
    """The fastest of ``repeat`` runs."""
    if warm:
        mx.eval(work())
    times: list[float] = []
    for _ in range(repeat):
        mx.synchronize()
        start = time.perf_counter()
        mx.eval(work())
        mx.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def _round(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else float(f"{value * factor:.4g}")


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}"


def _print_row(*cells: Any) -> None:
    print(
        "| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |", flush=True
    )


if __name__ == "__main__":
    main()
