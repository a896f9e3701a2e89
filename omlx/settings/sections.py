"""Which settings belong together, for people who look for one."""

from __future__ import annotations

from omlx.settings.model import NAMES

SECTIONS: dict[str, tuple[str, ...]] = {
    "resources": (
        "memory_budget",
        "hot_cache_max_size",
        "ssd_cache_max_size",
        "ssd_free_space_floor",
        "ssd_cache_dir",
        "paged_cache_block_size",
        "cache_enabled",
    ),
    "recurrent": (
        "gdn_snapshot_storage",
        "gdn_sidecar_state_dtype",
        "gdn_ssd_pending_max_size",
        "gdn_checkpoint_interval",
    ),
    "requests": (
        "max_concurrent_requests",
        "max_queued_requests",
        "default_max_tokens",
        "max_context",
        "prefill_step_tokens",
        "decode_share",
        "strip_attribution",
    ),
    "model": ("model", "model_dir", "model_aliases"),
    "access": ("api_key", "admin_key", "allowed_hosts", "cors_origins"),
    "server": ("host", "port", "body_max_size", "max_connections", "drain_timeout_s", "log_level"),
    "advanced": (
        "ssd_write_policy",
        "ssd_pending_max_size",
        "initial_cache_blocks",
        "max_cache_blocks",
    ),
}
"""In the order in which a page shows them. What no section names is advanced."""

_SECTION = {name: section for section, names in SECTIONS.items() for name in names}
_ORDER = {name: place for place, name in enumerate(_SECTION)}

assert _SECTION.keys() <= set(NAMES), "a section names a setting that there is not"


def section_of(name: str) -> str:
    return _SECTION.get(name, "advanced")


def in_order() -> tuple[str, ...]:
    """Every setting, section by section."""
    sections = list(SECTIONS)
    return tuple(
        sorted(
            NAMES,
            key=lambda name: (sections.index(section_of(name)), _ORDER.get(name, len(NAMES))),
        )
    )
