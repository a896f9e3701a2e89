"""Load a model on the engine thread, in the form that the backend computes fastest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from omlx.cache.hybrid_cache import ModelCacheConfig
from omlx.engine import cpu_ops, gdn_chunked
from omlx.engine.host_memory import keep_freed_memory
from omlx.engine.kv import UnsupportedModel, fresh_caches, probe


@dataclass(frozen=True)
class LoadedModel:
    """``model`` belongs to the engine thread; the rest may be read anywhere."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    cache: ModelCacheConfig
    max_context: int
    vocab_size: int
    weight_bytes: int
    weight_dtype: str
    backend: str
    notes: tuple[str, ...] = ()
    """Sentences for the start-up lines."""


def backend_name() -> str:
    """metal, cuda or cpu."""
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.default_device() == mx.Device(mx.gpu) else "cpu"


def working_set_bytes() -> int | None:
    """What the device may hold, where MLX knows it (Metal, CUDA); None on CPU."""
    info: dict[str, Any] = dict(mx.device_info())
    size = info.get("max_recommended_working_set_size") or info.get("total_memory")
    return int(size) if size else None


def load(path: Path, float32_limit_bytes: int) -> LoadedModel:
    """Load weights and tokenizer, and probe what the layers keep.

    On CPU only float32 matmul is fast (30 times bf16 and quantised ones), so weights are
    converted, unless they would take more than ``float32_limit_bytes``. Raises UnsupportedModel,
    FileNotFoundError or ValueError.
    """
    backend = backend_name()
    if backend == "cpu":
        keep_freed_memory()
    model, config, notes = _open(path, float32_limit_bytes)
    mx.eval(model.parameters())
    model.eval()
    tokenizer = load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
    cache = _probe(model)
    weight_bytes, weight_dtype = _weigh(model)
    return LoadedModel(
        model,
        tokenizer,
        cache,
        max_context=_max_context(config),
        vocab_size=int(_text_config(config).get("vocab_size") or len(tokenizer)),
        weight_bytes=weight_bytes,
        weight_dtype=weight_dtype,
        backend=backend,
        notes=notes,
    )


@dataclass(frozen=True)
class ModelSketch:
    """What can be known of a model without loading its weights."""

    cache: ModelCacheConfig
    max_context: int
    weight_bytes: int
    weight_dtype: str
    notes: tuple[str, ...]


def sketch(path: Path, float32_limit_bytes: int) -> ModelSketch:
    """Open a model as ``load`` does and read no weights: arrays stay promises. Raises alike."""
    model, config, notes = _open(path, float32_limit_bytes)
    model.eval()
    cache = _probe(model, evaluate=False)
    return ModelSketch(cache, _max_context(config), *_weigh(model), notes)


def _open(
    path: Path, float32_limit_bytes: int
) -> tuple[nn.Module, dict[str, Any], tuple[str, ...]]:
    """The model in the form that it is computed in, not evaluated; its config; notes."""
    backend = backend_name()
    if backend != "metal":
        gdn_chunked.install()  # mlx-lm's kernel is for Metal; elsewhere it loops over tokens
    model, config = load_model(path, lazy=True)
    notes: list[str] = []
    if backend == "cpu":
        wanted = _float32_bytes(model)
        if wanted <= float32_limit_bytes:
            _to_float32(model)
        else:
            notes.append(
                f"float32 weights would take {wanted / 1e9:.1f} GB, more than "
                f"{float32_limit_bytes / 1e9:.1f} GB, so they stay as they are: slow on CPU"
            )
        cpu_ops.install(model)
    return model, config, tuple(notes)


def _probe(model: nn.Module, *, evaluate: bool = True) -> ModelCacheConfig:
    try:
        fresh_caches(model)
        return probe(model, evaluate=evaluate)
    except Exception as error:
        raise UnsupportedModel(f"a first forward pass failed: {error!r}") from error


def _weigh(model: nn.Module) -> tuple[int, str]:
    """(bytes of all parameters, their dtypes)"""
    parameters = dict(tree_flatten(model.parameters()))
    dtypes = {str(array.dtype).removeprefix("mlx.core.") for array in parameters.values()}
    return sum(array.nbytes for array in parameters.values()), "+".join(sorted(dtypes))


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def _max_context(config: dict[str, Any]) -> int:
    return int(_text_config(config).get("max_position_embeddings") or 1 << 20)


def _float32_bytes(model: nn.Module) -> int:
    total = 0
    for _, module in model.named_modules():
        if hasattr(module, "bits") and hasattr(module, "scales"):
            total += module.scales.size * module.group_size * 4
        else:
            own = [v for v in module.values() if isinstance(v, mx.array)]
            total += sum(array.size * 4 for array in own)
    return total


def _to_float32(model: nn.Module) -> None:
    """Cast first, then dequantise: so the scales are multiplied in float32, without rounding."""

    def cast(array: mx.array) -> mx.array:
        floating = array.dtype in (mx.float16, mx.bfloat16)
        return array.astype(mx.float32) if floating else array

    model.apply(cast)
    dequantize_model(model)
