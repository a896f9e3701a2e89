"""A model is loaded in the form that its backend computes fastest, or says why it is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from omlx.engine.kv import UnsupportedModel
from omlx.engine.load import LoadedModel, backend_name, load
from tests import tiny

ModelPath = Callable[[str], Path]
PLENTY = 1 << 30

on_cpu = pytest.mark.skipif(backend_name() != "cpu", reason="other backends keep the weights")


def weights(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


@on_cpu
@pytest.mark.parametrize("name", ["llama-bf16", "llama-fp16"])
def test_half_precision_weights_become_float32_without_changing(
    model_path: ModelPath, name: str
) -> None:
    stored, _ = load_model(model_path(name))

    loaded = load(model_path(name), PLENTY)

    assert loaded.weight_dtype == "float32"
    assert loaded.cache.layers[0].dtype == "float32"
    assert not loaded.notes
    converted = weights(loaded.model)
    for path, array in weights(stored).items():
        assert converted[path].dtype == mx.float32
        assert mx.array_equal(converted[path], array.astype(mx.float32)).item(), path


@on_cpu
def test_quantised_weights_become_float32_without_rounding(model_path: ModelPath) -> None:
    """Scales and biases are multiplied and added in float32, not in what they are stored in."""
    raw: Any = mx.load(str(model_path("llama-4bit") / "model.safetensors"))

    loaded = load(model_path("llama-4bit"), PLENTY)

    assert loaded.weight_dtype == "float32"
    converted = weights(loaded.model)
    assert not [path for path in converted if path.endswith((".scales", ".biases"))]
    for path, scales in raw.items():
        if path.endswith(".scales"):
            stem = path.removesuffix(".scales")
            scales, biases = (
                np.array(raw[f"{stem}.{part}"].astype(mx.float32)) for part in ("scales", "biases")
            )
            levels = _levels(np.array(raw[f"{stem}.weight"]))
            wanted = levels * scales[..., None] + biases[..., None]
            found = np.array(converted[f"{stem}.weight"])
            assert np.allclose(found, wanted.reshape(found.shape), rtol=2e-7, atol=0), stem


def _levels(packed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """4-bit groups of 32, eight in each 32-bit word, lowest bits first: (rows, groups, 32)."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    levels = (packed[..., None] >> shifts & 0xF).astype(np.float32)
    return levels.reshape(packed.shape[0], -1, 32)


@on_cpu
@pytest.mark.parametrize("name", ["llama-bf16", "llama-4bit"])
def test_weights_that_would_grow_too_large_stay_as_they_are_with_a_note(
    model_path: ModelPath, name: str
) -> None:
    stored, _ = load_model(model_path(name))

    loaded = load(model_path(name), 1000)

    assert len(loaded.notes) == 1
    assert "float32 weights would take" in loaded.notes[0]
    assert loaded.weight_bytes == sum(array.nbytes for array in weights(stored).values())
    assert "float32" not in loaded.weight_dtype or name == "llama-4bit"


def test_the_limit_is_what_the_converted_weights_take(model_path: ModelPath) -> None:
    size = load(model_path("llama-4bit"), PLENTY).weight_bytes

    assert not load(model_path("llama-4bit"), size).notes
    assert load(model_path("llama-4bit"), size - 1).notes or backend_name() != "cpu"


@pytest.mark.parametrize("name", tiny.NAMES)
def test_what_the_rest_needs_to_know_comes_from_the_folder(
    model_path: ModelPath, name: str
) -> None:
    loaded = load(model_path(name), PLENTY)

    assert loaded.max_context == tiny.CONTEXT
    assert loaded.vocab_size == len(loaded.tokenizer)
    assert loaded.tokenizer.eos_token_ids == {loaded.tokenizer.convert_tokens_to_ids(tiny.EOS)}
    assert loaded.cache.why_not_cacheable is None
    assert loaded.weight_bytes == sum(a.nbytes for a in weights(loaded.model).values())


# ── what cannot be loaded ────────────────────────────────────────────────────────────────────


@pytest.fixture
def copy(model_path: ModelPath, tmp_path: Path) -> Path:
    """A folder of llama that may be damaged."""
    return Path(shutil.copytree(model_path("llama"), tmp_path / "model"))


def changed(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def test_a_folder_without_weights_is_a_missing_file(copy: Path) -> None:
    (copy / "model.safetensors").unlink()

    with pytest.raises(FileNotFoundError, match="safetensors"):
        load(copy, PLENTY)


def test_an_architecture_that_is_unknown_is_named(copy: Path) -> None:
    changed(copy, model_type="phlogiston")

    with pytest.raises(ValueError, match="phlogiston"):
        load(copy, PLENTY)


def test_weights_of_another_shape_are_refused(copy: Path) -> None:
    changed(copy, num_hidden_layers=3)

    with pytest.raises(ValueError, match="layers"):
        load(copy, PLENTY)


def test_a_model_that_cannot_compute_one_token_is_unsupported(copy: Path) -> None:
    changed(copy, vocab_size=8, num_attention_heads=3)

    with pytest.raises((UnsupportedModel, ValueError)):
        load(copy, PLENTY)


def test_a_config_without_a_context_has_a_generous_one(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    del config["max_position_embeddings"]
    (copy / "config.json").write_text(json.dumps(config))

    loaded: LoadedModel = load(copy, PLENTY)

    assert loaded.max_context == 1 << 20
