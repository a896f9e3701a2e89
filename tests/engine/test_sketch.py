"""What is said of a model before it is loaded is what holds once it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from omlx.engine.load import LoadedModel, sketch
from omlx.engine.measure import measure

PLENTY = 1 << 30


@pytest.mark.parametrize("name", ["llama-4bit", "llama-bf16", "gemma3", "qwen3_next", "qwen3_5"])
def test_a_sketch_says_what_loading_says(
    model_path: Callable[[str], Path], loaded: Callable[[str], LoadedModel], name: str
) -> None:
    wanted = loaded(name)

    found = sketch(model_path(name), PLENTY)

    assert found.cache == wanted.cache
    assert (found.weight_bytes, found.weight_dtype) == (wanted.weight_bytes, wanted.weight_dtype)
    assert (found.max_context, found.notes) == (wanted.max_context, wanted.notes)


def test_a_sketch_reads_no_weights(model_path: Callable[[str], Path]) -> None:
    path = model_path("llama-bf16")
    mx.reset_peak_memory()
    before = mx.get_active_memory()

    found = sketch(path, PLENTY)

    assert mx.get_peak_memory() - before < found.weight_bytes / 10


def test_something_is_measured() -> None:
    speed = measure()

    assert speed.matmul_gflops > 0 and speed.matmul_threads > 0 and speed.read_bytes_per_s > 0
