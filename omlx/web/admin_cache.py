"""The admin API of the cache: what is in it, what a prompt would find, clearing and verifying.

Who may ask, and from where, is settled before (``auth``): a POST is JSON, and from our own pages.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Literal

from aiohttp import web

from omlx.actors.disk_messages import FilesVerified, StopVerifying, VerifyFiles
from omlx.actors.messages import (
    AskReuseBySize,
    CacheTree,
    ClearCache,
    Detokenize,
    ProbeCache,
    TokensOf,
)
from omlx.cache.blocks import BlockHash, pack_tokens, unpack_tokens
from omlx.cache.reuse_by_size import HOURS
from omlx.cache.tree_view import NodeView
from omlx.core.chat import GenerationRequest
from omlx.kernel.mailbox import Ref
from omlx.kernel.message import MailboxFull, Rejected
from omlx.web.admin import JSON_HEADERS
from omlx.web.body import Count, Loose, parse
from omlx.web.chat_schema import conversation_of, parse_chat
from omlx.web.edge import EDGE
from omlx.web.errors import ApiError, invalid, json_response
from omlx.web.generation import check_ready, helpers_of, render
from omlx.web.pages import add_page

DEPTH_SHOWN, DEPTH_MAX = 64, 65536
TEXT_SHOWN = 80
"""Of a block: as many characters, and no more tokens."""
NODES_MAX = 2000
"""Half a megabyte of JSON."""


class ClearIn(Loose):
    tier: Literal["hot", "ssd", "all"]


TIERS = {"hot": (True, False), "ssd": (False, True), "all": (True, True)}


def add_admin_cache(app: web.Application) -> None:
    add_page(app, "/admin/cache", "cache")
    app.router.add_get("/admin/api/cache/tree", tree)
    app.router.add_get("/admin/api/cache/nodes/{hash}", node_text)
    app.router.add_get("/admin/api/cache/advice", advice)
    app.router.add_post("/admin/api/cache/probe", probe)
    app.router.add_post("/admin/api/cache/clear", clear)
    app.router.add_post("/admin/api/cache/verify", verify)
    app.router.add_get("/admin/api/cache/verify", verified)


async def tree(request: web.Request) -> web.Response:
    given = request.query.get("depth", str(DEPTH_SHOWN))
    depth = int(given) if re.fullmatch(r"[0-9]{1,6}", given) else 0
    if not 1 <= depth <= DEPTH_MAX:
        raise invalid(f"depth must be a whole number from 1 to {DEPTH_MAX}.", "depth")
    found = await _cache(request).ask(CacheTree(depth, NODES_MAX))
    return _answer({"nodes": list(map(_node, found.nodes)), "left_out": found.left_out})


def _node(node: NodeView) -> dict[str, Any]:
    return {
        "hash": node.block_hash.hex(),
        "parent": node.parent.hex(),
        "tokens": node.num_tokens,
        "bytes": node.nbytes,
        "tiers": [tier for tier, there in (("ram", node.hot), ("ssd", node.ssd)) if there],
        "checkpoint": node.is_checkpoint,
        "place": None if node.place is None else node.place.name.lower(),
        "block": None if node.block is None else node.block.hex(),
        "refs": node.refs,
        "last_used": node.used_at,
    }


async def node_text(request: web.Request) -> web.Response:
    """How the text of a block begins. Only while texts are kept: it is what somebody wrote."""
    cache, edge = _cache(request), request.app[EDGE]
    name = request.match_info["hash"]
    tokens = None
    if re.fullmatch(r"[0-9a-f]{64}", name):
        tokens = await cache.ask(TokensOf(BlockHash(bytes.fromhex(name))))
    if tokens is None:
        raise ApiError(404, "There is no such block, or no longer.", param="hash", code="not_found")
    text = None
    if edge.captures.on:
        first = tuple(unpack_tokens(tokens)[:TEXT_SHOWN])
        text = (await helpers_of(edge).tokenizer.ask(Detokenize(first)))[:TEXT_SHOWN]
    return _answer({"hash": name, "text": text})


async def advice(request: web.Request) -> web.Response:
    """What caches of other sizes would have kept of the tokens reused in the last 24 hours."""
    found = await _cache(request).ask(AskReuseBySize())
    kept = [{"bytes": nbytes, "tokens": tokens} for nbytes, tokens in found.kept]
    return _answer({"hours": HOURS, "reused_tokens": found.reused_tokens, "kept": kept})


class ProbeIn(Loose):
    messages: list[Any] | None = None
    prompt: str | list[Count] | None = None
    cache_salt: str | None = None


async def probe(request: web.Request) -> web.Response:
    cache, edge = _cache(request), request.app[EDGE]
    asked = _asked(await request.read(), edge.vocab_size)
    rendered, _ = await render(edge, helpers_of(edge), asked)
    if not rendered.tokens:
        raise invalid(f"The {asked.field} gives an empty prompt.", asked.field)
    found = await cache.ask(ProbeCache(pack_tokens(rendered.tokens), asked.salt))
    ended = found.reuse_ended
    return _answer(
        {
            "prompt_tokens": len(rendered.tokens),
            "cached_ram": found.cached_ram,
            "cached_ssd": found.cached_ssd,
            "reuse_ended": {"reason": ended.reason, "token": ended.token},
        }
    )


def _asked(raw: bytes, vocab_size: int) -> GenerationRequest:
    """``messages`` as a chat takes them, or ``prompt``: a text, or token ids."""
    body = parse(ProbeIn, raw)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Give either messages or prompt.", "messages", "missing_field")
    if body.prompt is None:
        chat = parse_chat(raw)
        return GenerationRequest(conversation_of(chat), "messages", salt=chat.cache_salt or "")
    prompt = body.prompt if isinstance(body.prompt, str) else tuple(body.prompt)
    if isinstance(prompt, tuple) and not all(0 <= token < vocab_size for token in prompt):
        raise invalid(f"prompt: token ids are from 0 to {vocab_size - 1}.", "prompt")
    return GenerationRequest(prompt, "prompt", salt=body.cache_salt or "")


async def clear(request: web.Request) -> web.Response:
    cache = _cache(request)
    hot, ssd = TIERS[parse(ClearIn, await request.read()).tier]
    cleared = await cache.ask(ClearCache(hot, ssd))
    return _answer(
        {
            "freed_bytes": cleared.freed_bytes,
            "freed_blocks": cleared.freed_blocks,
            "kept_in_use": cleared.kept_in_use,
        }
    )


async def verify(request: web.Request) -> web.Response:
    """Takes as long as reading every file does. Who goes away stops it."""
    cache = _cache(request)
    try:
        text = await cache.ask(VerifyFiles())
    except asyncio.CancelledError:
        cache.offer(StopVerifying())
        raise
    except MailboxFull:
        raise
    except Rejected as refusal:
        message = f"The files can't be verified now: {refusal}."
        raise ApiError(409, message, code="not_now") from None
    return web.Response(text=text, content_type="application/json", headers=JSON_HEADERS)


async def verified(request: web.Request) -> web.Response:
    """How far the verification is that runs; null when none does."""
    return _answer({"files": await _cache(request).ask(FilesVerified())})


def _cache(request: web.Request) -> Ref[Any]:
    """Raises ApiError while there is none."""
    edge = request.app[EDGE]
    check_ready(edge)
    assert edge.cache is not None, "a ready server has its actors"
    return edge.cache


def _answer(body: dict[str, Any]) -> web.Response:
    return json_response(body, headers=JSON_HEADERS)
