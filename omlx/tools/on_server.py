"""``omlx cache --url``: a running server is asked, and answers for what it serves."""

from __future__ import annotations

import argparse
import time

from omlx.tools.cache_server import CacheServer
from omlx.tools.dialogue import FOUND_BAD, Refused, agreed
from omlx.tools.show import age_text, plain, print_json, show_verified, size_text, table


def on_server(arguments: argparse.Namespace, server: CacheServer) -> int:
    match arguments.action:
        case "stats":
            return _server_stats(server, arguments.json)
        case "verify":
            return _server_verify(server, arguments.json)
        case "ls":
            return _server_ls(server, arguments.json)
        case _:
            return _server_clear(server, arguments)


def _server_stats(server: CacheServer, as_json: bool) -> int:
    found = server.get("stats")
    parts = {name: found.get(name) or {} for name in ("model", "cache", "gdn")}
    if as_json:
        print_json(parts)
        return 0
    rows: list[tuple[str, str]] = []
    for part, values in parts.items():
        for name, value in values.items():
            is_size = name.endswith("_bytes") and isinstance(value, int)
            rows.append((f"{part}.{plain(name)}", size_text(value) if is_size else plain(value)))
    table(("", "value"), rows)
    return 0


def _server_verify(server: CacheServer, as_json: bool) -> int:
    result = server.post("cache/verify", {}, timeout_s=None)
    try:
        bad = bool(result["corrupt_files"]) or bool(result.get("unreadable_files"))
        if as_json:
            print_json(result)
        else:
            show_verified(result)
    except (KeyError, TypeError, ValueError):
        raise Refused("the server's answer is not the one of this version") from None
    return FOUND_BAD if bad else 0


def _server_ls(server: CacheServer, as_json: bool) -> int:
    found = server.get("cache/tree")
    if as_json:
        print_json(found)
        return 0
    now = time.time()
    try:
        rows = [
            (
                plain(node["hash"])[:12],
                "checkpoint" if node["checkpoint"] else "block",
                plain(node["parent"])[:12],
                "+".join(map(plain, node["tiers"])),
                plain(node["tokens"]),
                size_text(node["bytes"]),
                plain(node["refs"]),
                age_text(node["last_used"], now),
            )
            for node in found["nodes"]
        ]
    except (KeyError, TypeError):
        raise Refused("the server's answer is not the one of this version") from None
    headings = ("hash", "kind", "parent", "tiers", "tokens", "bytes", "refs", "used")
    table(headings, rows, left=4)
    if found.get("left_out"):
        print(f"{plain(found['left_out'])} more are left out")
    return 0


def _server_clear(server: CacheServer, arguments: argparse.Namespace) -> int:
    tier = arguments.tier or "ssd"
    what = {"hot": "the hot tier", "ssd": "every cache file", "all": "both tiers"}[tier]
    if not agreed(arguments, f"Clear {what} of that server?"):
        return 0
    found = server.post("cache/clear", {"tier": tier})
    if arguments.json:
        print_json(found)
        return 0
    try:
        freed, blocks = size_text(int(found["freed_bytes"])), int(found["freed_blocks"])
        print(f"cleared {blocks} blocks, {freed}; {int(found['kept_in_use'])} are in use and stay")
    except (KeyError, TypeError, ValueError):
        raise Refused("the server's answer is not the one of this version") from None
    return 0
