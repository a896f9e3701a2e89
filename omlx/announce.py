"""What the server says when it starts: the model, what it runs on, and every size as a number."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from omlx import blas
from omlx.budget import Budget, gigabytes, memory_lines, memory_text, memory_warning
from omlx.cache.hybrid_cache import LayerKind
from omlx.core.memory import MemoryPlan
from omlx.settings import Loaded

if TYPE_CHECKING:  # it imports MLX, and what is said here of settings is also read without it
    from omlx.engine.load import LoadedModel

log = logging.getLogger("omlx")


def announce(
    loaded: Loaded,
    model_id: str,
    model: LoadedModel,
    budget: Budget,
    plan: MemoryPlan,
    root: Path | None,
) -> None:
    """Log the start-up lines. ``root`` None: nothing is kept in files."""
    _say_model(model_id, model)
    _say_memory(loaded, model, budget, plan)
    _say_cache(loaded, model, budget, root)
    for warning in (*model.notes, *loaded.warnings):
        log.warning("%s", warning)


def _say_model(model_id: str, model: LoadedModel) -> None:
    cache = model.cache
    kinds = ", ".join(f"{count} {kind}" for kind in LayerKind if (count := cache.count(kind)))
    log.info(
        "model %s: layers %s; %s, context %d, %s bytes of KV a token",
        model_id,
        kinds,
        model.weight_dtype,
        model.max_context,
        f"{cache.bytes_per_token:,}",
    )
    log.info("backend %s, BLAS: %s", model.backend, blas.describe_blas())


def _say_memory(loaded: Loaded, model: LoadedModel, budget: Budget, plan: MemoryPlan) -> None:
    context = min(loaded.settings.max_context or model.max_context, model.max_context)
    lines = memory_lines(budget, plan, loaded.settings, model.cache, context)
    for text in memory_text(budget, lines):
        log.info("memory: %s", text)
    warning = memory_warning(plan, context)
    if warning is not None:
        log.warning("memory: %s", warning)


def _say_cache(loaded: Loaded, model: LoadedModel, budget: Budget, root: Path | None) -> None:
    settings, sizes, cache = loaded.settings, budget.sizes, model.cache
    if not cache.batches:
        log.warning("batching: off, requests take turns: mlx-lm can't batch this model's KV cache")
    why_not = cache.why_not_cacheable
    if not settings.cache_enabled:
        log.info("cache: off")
        return
    if why_not is not None:
        log.warning("cache: off, prefixes of this model can't be reused: %s", why_not)
        return
    if root is None or not sizes.ssd_limit_bytes:
        log.info("SSD tier: off; nothing is kept over a restart")
    else:
        log.info(
            "SSD tier: %s in %s, %s of the volume stay free; written %s, at most %s wait for it",
            gigabytes(sizes.ssd_limit_bytes),
            root,
            gigabytes(sizes.ssd_floor_bytes),
            sizes.ssd_write_policy,
            gigabytes(sizes.pending_limit_bytes),
        )
        block = sizes.block_size * cache.bytes_per_token
        if sizes.ssd_limit_bytes < block:
            log.warning(
                "SSD tier: a block of %d tokens has %s, so none will be kept in files",
                sizes.block_size,
                gigabytes(block),
            )
    if cache.is_recurrent:
        log.info(
            "checkpoints: %s each, at the ends of system part, prompt and turn, where prompts "
            "branch, and every %d tokens; written as %s",
            gigabytes(cache.checkpoint_bytes),
            sizes.checkpoint_interval,
            settings.gdn_sidecar_state_dtype,
        )
