"""Which names below the cache directory are ours, and what each of them says.

    <root>/lock
    <root>/blocks.noindex/<namespace, 16 hex>/<first 2 hex>/<sha256>.safetensors
    <root>/blocks.noindex/<namespace>/_gdn_sidecars/<first 2 hex>/<sha256>.safetensors

A file is written beside its final name as ``.<sha256>.<owner>.<random>.tmp``. Whatever has
another name, or lies elsewhere, is not ours: it is counted and never touched.
"""

from __future__ import annotations

import re
import secrets

from omlx.cache.blocks import BlockHash

LOCK = "lock"

BLOCKS = "blocks.noindex"
"""Spotlight leaves folders alone that end in .noindex."""

SIDECARS = "_gdn_sidecars"

SUFFIX = ".safetensors"

_BLOCK_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{64}\.([0-9]+-[0-9a-f]{16})\.[0-9a-f]{16}\.tmp")
_SHARD_NAME = re.compile(r"[0-9a-f]{2}")
_NAMESPACE_NAME = re.compile(r"[0-9a-f]{16}")
_BLOCK_PATH = re.compile(
    rf"{re.escape(BLOCKS)}/[0-9a-f]{{16}}/(?:{SIDECARS}/)?([0-9a-f]{{2}})/\1[0-9a-f]{{62}}"
    rf"{re.escape(SUFFIX)}"
)


def block_path(namespace: str, block_hash: BlockHash, *, checkpoint: bool = False) -> str:
    """Where a block's file lies, relative to the root."""
    name = block_hash.hex()
    kind = f"{SIDECARS}/" if checkpoint else ""
    return f"{BLOCKS}/{namespace}/{kind}{name[:2]}/{name}{SUFFIX}"


def temporary_path(path: str, owner: str) -> str:
    """A name beside ``path`` that nobody else uses."""
    folder, _, name = path.rpartition("/")
    stem = name.removesuffix(SUFFIX)
    return f"{folder}/.{stem}.{owner}.{secrets.token_hex(8)}.tmp"


def folders_above(path: str) -> list[str]:
    """Each folder between the root and a relative ``path``, from the top."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def is_block_path(path: str) -> bool:
    """Whether a relative path is one that a block of some namespace would have."""
    return _BLOCK_PATH.fullmatch(path) is not None


def is_block_name(name: str, shard: str) -> bool:
    return name.startswith(shard) and _BLOCK_NAME.fullmatch(name) is not None


def is_shard_name(name: str) -> bool:
    return _SHARD_NAME.fullmatch(name) is not None


def is_namespace_name(name: str) -> bool:
    return _NAMESPACE_NAME.fullmatch(name) is not None


def owner_of_temporary(name: str) -> str | None:
    """Who writes there, or did; None when it is no temporary's name."""
    match = _TEMPORARY_NAME.fullmatch(name)
    return match[1] if match else None
