"""What the server says when it starts: the model, what it runs on, and every size as a number."""

from __future__ import annotations

import logging
from pathlib import Path

from omlx import blas
from omlx.budget import Budget, gigabytes
from omlx.cache.hybrid_cache import LayerKind
from omlx.engine.load import LoadedModel
from omlx.settings import Loaded

log = logging.getLogger("omlx")

WITHOUT_EFFECT = (
    "cors_origins",
    "strip_attribution",
    "ssd_write_policy",
    "ssd_free_space_floor",
    "decode_share",
)
"""Settings that are understood, and that nothing acts on yet."""


def announce(
    loaded: Loaded, model_id: str, model: LoadedModel, budget: Budget, root: Path | None
) -> None:
    """Log the start-up lines. ``root`` None: nothing is kept in files."""
    _say_model(model_id, model)
    _say_memory(model, budget)
    _say_cache(loaded, model, budget, root)
    for name in WITHOUT_EFFECT:
        if loaded.is_set(name):
            log.warning("%s is set (%s) and has no effect yet", name, loaded.sources[name])
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


def _say_memory(model: LoadedModel, budget: Budget) -> None:
    sizes = budget.sizes
    block = sizes.block_size * model.cache.bytes_per_token
    log.info(
        "memory: %s of the %s; weights %s, hot tier %s (%d blocks of %d tokens, %s each)",
        gigabytes(budget.total_bytes),
        budget.pool,
        gigabytes(model.weight_bytes),
        gigabytes(sizes.hot_limit_bytes),
        sizes.hot_limit_bytes // max(1, block),
        sizes.block_size,
        gigabytes(block),
    )


def _say_cache(loaded: Loaded, model: LoadedModel, budget: Budget, root: Path | None) -> None:
    settings, sizes, cache = loaded.settings, budget.sizes, model.cache
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
            "SSD tier: %s in %s; at most %s wait to be written",
            gigabytes(sizes.ssd_limit_bytes),
            root,
            gigabytes(sizes.pending_limit_bytes),
        )
    if cache.is_recurrent:
        log.info(
            "checkpoints: %s each, at the ends of system part, prompt and turn, where prompts "
            "branch, and every %d tokens; written as %s",
            gigabytes(cache.checkpoint_bytes),
            sizes.checkpoint_interval,
            settings.gdn_sidecar_state_dtype,
        )
