"""The admin API of the cache tells what is there, clears what it says, and harms nobody."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from omlx.actors.daemon_threads import DaemonThreads
from omlx.actors.disk_messages import VerifyFiles
from omlx.actors.messages import IsScanned, Settle
from omlx.actors.paged_cache import PagedCache
from omlx.actors.ssd_reader import SsdReader
from omlx.actors.ssd_writer import SsdWriter
from omlx.actors.stats import Stats
from omlx.actors.stats_file import StatsFile
from omlx.actors.tokenizer import Tokenizer
from omlx.cache.blocks import BlockHash, chain_hash, pack_tokens, root_hash
from omlx.cache.prefix_cache import BlockAwarePrefixCache
from omlx.cache.tickets import StoreWish
from omlx.cli import main
from omlx.core.plan import LookUp, Seal, SettleWork, Uid
from omlx.disk.block_files import BlockFiles
from omlx.disk.directory import CacheDirectory
from omlx.disk.verify import Verified
from omlx.kernel.mailbox import Mailbox, Ref
from omlx.kernel.message import ActorGone
from omlx.kernel.restart import RestartBudget
from omlx.kernel.supervisor import Supervisor
from omlx.settings import load_settings
from omlx.web.edge import Edge
from omlx.web.server import make_app
from tests.cachefiles import (
    BLOCK_SIZE,
    CONFIG,
    NAMESPACE,
    OTHER_NAMESPACE,
    CacheFiles,
)

KEY = "sk-admin-0123456789"
BLOCK_BYTES = BLOCK_SIZE * CONFIG.bytes_per_token
VOCABULARY = 256
SOON_S = 20.0


class Bytes:
    """A tokenizer: the bytes of a text are its tokens."""

    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def apply_chat_template(self, messages: Any, /, **_: Any) -> str:
        return "".join(message["content"] for message in messages)

    def encode(self, text: str, /, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], /, **_: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")


class HeldFiles(BlockFiles):
    """Verifying waits until it may go on."""

    def __init__(self, directory: CacheDirectory) -> None:
        super().__init__(directory, NAMESPACE, CONFIG, BLOCK_SIZE)
        self.begun, self.go, self.was_stopped = (threading.Event() for _ in range(3))

    def verify(self, stopped: Callable[[], bool]) -> Verified:
        self.begun.set()
        while not (stopped() or self.go.wait(0.01)):
            pass
        if stopped():
            self.was_stopped.set()
        return super().verify(stopped)


@dataclass
class Served:
    url: str
    http: ClientSession
    edge: Edge
    cache: Ref[Any]
    book: BlockAwarePrefixCache
    files: HeldFiles

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.http.get(f"{self.url}/admin/api/cache/{path}") as answer:
            return answer.status, await answer.json()

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, dict[str, Any]]:
        url = f"{self.url}/admin/api/cache/{path}"
        async with self.http.post(url, json=body, **options) as answer:
            return answer.status, await answer.json()

    async def store(self, parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
        """Put a block into RAM, as a running request does."""
        packed = pack_tokens(tokens)
        wish = StoreWish(parent, chain_hash(parent, packed), packed, persist=False)
        # A block is stored behind what is known; the look-up makes the beginning so.
        work = SettleWork(look_ups=(LookUp(Uid(1), packed, ""),), wishes=((Uid(1), 0, wish),))
        settled = await self.cache.ask(Settle(work))
        (store,) = settled.stores
        seal = Seal(store.ticket, stored=True, writing=False)
        await self.cache.ask(Settle(SettleWork(seals=(seal,))))
        return wish.block_hash


async def until_scanned(cache: Ref[Any]) -> None:
    for _ in range(1000):
        if await cache.ask(IsScanned()):
            return
        await asyncio.sleep(0.02)
    pytest.fail("the files are not known yet")


@asynccontextmanager
async def serving(
    root: Path, home: Path, *, ssd: bool = True, **settings: Any
) -> AsyncIterator[Served]:
    directory = CacheDirectory(root)
    directory.acquire()
    held = HeldFiles(directory)
    book = BlockAwarePrefixCache(
        namespace=NAMESPACE,
        block_size=BLOCK_SIZE,
        bytes_per_token=CONFIG.bytes_per_token,
        hot_limit_bytes=1 << 20,
        ssd_limit_bytes=1 << 20,
        pending_limit_bytes=1 << 20,
    )
    supervisor = Supervisor(RestartBudget(3, 10.0))
    stats = supervisor.add("stats", Stats.capacity, lambda: Stats(StatsFile(home / "stats.json")))
    threads = [DaemonThreads(1, "test-files") for _ in range(3)]
    refs: dict[str, Any] = {"writer": None, "reader": None}
    if ssd:
        refs["writer"] = supervisor.add(
            "ssd_writer",
            SsdWriter.capacity,
            lambda: SsdWriter(held, refs["cache"], threads[0]),
        )
        refs["reader"] = supervisor.add(
            "ssd_reader",
            SsdReader.capacity,
            lambda: SsdReader(held, refs["cache"], refs["writer"], threads[1], threads[2]),
        )
    refs["cache"] = supervisor.add(
        "paged_cache",
        PagedCache.capacity,
        lambda: PagedCache(book, stats, refs["reader"], refs["writer"], wall=lambda: 1234.5),
    )
    tokenizer = supervisor.add("tokenizer", Tokenizer.capacity, lambda: Tokenizer(Bytes()))
    edge = Edge(
        load_settings(settings, {}, home),
        stats,
        tokenizer=tokenizer,
        scheduler=Ref("scheduler", Mailbox(1)),
        cache=refs["cache"],
        max_context=1000,
        vocab_size=VOCABULARY,
        state="ready",
    )
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop))
    server = TestServer(make_app(edge))
    await server.start_server()
    try:
        await until_scanned(refs["cache"])
        async with ClientSession() as http:
            url = str(server.make_url("")).rstrip("/")
            yield Served(url, http, edge, refs["cache"], book, held)
    finally:
        stop.set()
        await running
        await server.close()
        for thread in threads:
            thread.close(1.0)
        directory.release()


@pytest.fixture
def made(tmp_path: Path) -> CacheFiles:
    return CacheFiles(tmp_path / "cache")


@pytest.fixture
async def served(made: CacheFiles, tmp_path: Path) -> AsyncIterator[Served]:
    """With nothing in the cache."""
    async with serving(made.root, tmp_path) as served:
        yield served


ROOT = root_hash(NAMESPACE)


# ── the tree ─────────────────────────────────────────────────────────────────────────────────


async def test_the_tree_shows_what_can_be_found(made: CacheFiles, tmp_path: Path) -> None:
    head, child = made.chain(2)
    os.utime(made.path(child), (99.0, 99.0))
    async with serving(made.root, tmp_path) as served:
        leaf = await served.store(child, [7, 7])
        prompt = pack_tokens([0] * BLOCK_SIZE + [9])
        look_up = LookUp(Uid(2), prompt, "")
        await served.cache.ask(Settle(SettleWork(look_ups=(look_up,))))

        status, answer = await served.get("tree")

    assert status == 200
    assert answer["left_out"] == 0
    nodes = {node["hash"]: node for node in answer["nodes"]}
    assert list(nodes) == [head.hex(), child.hex(), leaf.hex()]
    assert nodes[head.hex()]["parent"] == ROOT.hex()
    assert nodes[head.hex()]["last_used"] == 1234.5
    assert nodes[child.hex()] == {
        "hash": child.hex(),
        "parent": head.hex(),
        "tokens": BLOCK_SIZE,
        "bytes": BLOCK_BYTES,
        "tiers": ["ssd"],
        "checkpoint": False,
        "place": None,
        "block": None,
        "refs": 0,
        "last_used": 99.0,
    }
    assert (nodes[leaf.hex()]["tiers"], nodes[leaf.hex()]["tokens"]) == (["ram"], 2)


async def test_the_text_of_a_block_is_told_only_while_texts_are_kept(
    made: CacheFiles, tmp_path: Path
) -> None:
    (head,) = made.chain(1)
    async with serving(made.root, tmp_path) as served:
        leaf = await served.store(head, list(b"Hi"))
        _, private = await served.get(f"nodes/{leaf.hex()}")
        served.edge.captures.switch(True)
        _, told = await served.get(f"nodes/{leaf.hex()}")
        served.edge.captures.switch(False)
        _, after = await served.get(f"nodes/{leaf.hex()}")

    assert told == {"hash": leaf.hex(), "text": "Hi"}
    assert private == after == {"hash": leaf.hex(), "text": None}


@pytest.mark.parametrize("name", ["00" * 32, "x", "0" * 63, "AB" * 32])
async def test_a_block_that_is_not_there_is_said(served: Served, name: str) -> None:
    status, answer = await served.get(f"nodes/{name}")

    assert (status, answer["error"]["code"]) == (404, "not_found")


async def test_what_another_size_would_have_kept_is_told(made: CacheFiles, tmp_path: Path) -> None:
    (head,) = made.chain(1)
    async with serving(made.root, tmp_path) as served:
        _, before = await served.get("advice")
        await served.store(head, [7, 7])
        prompt = pack_tokens([0] * BLOCK_SIZE + [7, 7, 9])
        for uid in (8, 9):
            work = SettleWork(look_ups=(LookUp(Uid(uid), prompt, ""),))
            await served.cache.ask(Settle(work))
        _, after = await served.get("advice")

    assert (before["hours"], before["reused_tokens"]) == (24, 0)
    assert after["reused_tokens"] >= BLOCK_SIZE + 2
    assert after["kept"][0] == {"bytes": 1 << 20, "tokens": after["reused_tokens"]}


async def test_a_deeper_tree_than_asked_for_is_cut_and_says_so(
    made: CacheFiles, tmp_path: Path
) -> None:
    chain = made.chain(5)
    async with serving(made.root, tmp_path) as served:
        _, answer = await served.get("tree?depth=2")

    assert [node["hash"] for node in answer["nodes"]] == [name.hex() for name in chain[:2]]
    assert answer["left_out"] == 3


@pytest.mark.parametrize("depth", ["0", "-1", "1.5", "x", "", "1" * 7, "%D9%A3", "+1", "65537"])
async def test_a_depth_that_is_none_is_refused_by_name(served: Served, depth: str) -> None:
    status, answer = await served.get(f"tree?depth={depth}")

    assert (status, answer["error"]["param"]) == (400, "depth")


# ── what a prompt would find ─────────────────────────────────────────────────────────────────


async def test_a_prompt_is_followed_through_both_tiers(made: CacheFiles, tmp_path: Path) -> None:
    (cold,) = made.chain(1, seed=65)
    async with serving(made.root, tmp_path) as served:
        await served.store(cold, [66] * BLOCK_SIZE)
        wanted = {
            "prompt_tokens": 10,
            "cached_ram": 4,
            "cached_ssd": 4,
            "reuse_ended": {"reason": "no_block", "token": 8},
        }

        text = await served.post("probe", {"prompt": "AAAABBBBxx"})
        ids = await served.post("probe", {"prompt": [65] * 4 + [66] * 4 + [1, 2]})
        chat = {"messages": [{"role": "user", "content": "AAAABBBBxx"}]}
        messages = await served.post("probe", chat)
        salted = await served.post("probe", {**chat, "cache_salt": "mine"})

    assert text == ids == messages == (200, wanted)
    assert (salted[1]["cached_ram"], salted[1]["cached_ssd"]) == (0, 0)


async def test_probing_counts_nothing(made: CacheFiles, tmp_path: Path) -> None:
    made.chain(1, seed=65)
    async with serving(made.root, tmp_path) as served:
        await served.post("probe", {"prompt": "AAAAx"})

        assert (served.book.stats.hits, served.book.stats.misses) == (0, 0)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "b"}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, VOCABULARY]}, "prompt"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": "a", "cache_salt": 1}, "cache_salt"),
        ([], None),
        ("text", None),
    ],
)
async def test_a_probe_that_is_none_is_refused_by_name(
    served: Served, body: object, field: str | None
) -> None:
    status, answer = await served.post("probe", body)

    assert (status, answer["error"]["param"]) == (400, field)


# ── clearing ─────────────────────────────────────────────────────────────────────────────────


def files_of(root: Path) -> int:
    return len(list(root.rglob("*.safetensors")))


async def until_files(root: Path, count: int) -> None:
    for _ in range(1000):
        if files_of(root) == count:
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"there are {files_of(root)} files, not {count}")


async def test_the_ssd_tier_is_cleared_of_every_model(made: CacheFiles, tmp_path: Path) -> None:
    head, _ = made.chain(2)
    CacheFiles(made.root, OTHER_NAMESPACE).chain(1)
    theirs = made.root / "blocks.noindex" / "theirs.safetensors"
    theirs.write_bytes(b"theirs")
    nbytes = sum(path.stat().st_size for path in made.root.rglob("*.safetensors")) - 6
    async with serving(made.root, tmp_path) as served:
        await served.store(head, [7])

        status, answer = await served.post("clear", {"tier": "ssd"})

        await until_files(made.root, 1)
        assert status == 200
        assert answer == {"freed_bytes": nbytes, "freed_blocks": 2, "kept_in_use": 0}
        assert theirs.read_bytes() == b"theirs"
        assert served.book.pool.hot_bytes == CONFIG.bytes_per_token


async def test_the_hot_tier_is_cleared_but_for_what_is_in_use(
    made: CacheFiles, tmp_path: Path
) -> None:
    (head,) = made.chain(1)
    async with serving(made.root, tmp_path) as served:
        held = await served.store(ROOT, [1] * BLOCK_SIZE)
        await served.store(head, [7] * BLOCK_SIZE)
        look_up = LookUp(Uid(2), pack_tokens([1] * (BLOCK_SIZE + 1)), "")
        await served.cache.ask(Settle(SettleWork(look_ups=(look_up,))))

        status, answer = await served.post("clear", {"tier": "hot"})

        assert status == 200
        assert answer == {"freed_bytes": BLOCK_BYTES, "freed_blocks": 1, "kept_in_use": 1}
        assert served.book.pool.get(held) is not None
        assert files_of(made.root) == 1


@pytest.mark.parametrize("body", [{}, {"tier": "cold"}, {"tier": None}, {"tier": ["hot"]}])
async def test_a_tier_that_is_none_is_refused_by_name(
    made: CacheFiles, tmp_path: Path, body: object
) -> None:
    made.chain(1)
    async with serving(made.root, tmp_path) as served:
        status, answer = await served.post("clear", body)

    assert (status, answer["error"]["param"]) == (400, "tier")
    assert files_of(made.root) == 1


# ── verifying ────────────────────────────────────────────────────────────────────────────────


async def test_every_file_is_verified_and_none_is_removed(made: CacheFiles, tmp_path: Path) -> None:
    chain = made.chain(3)
    async with serving(made.root, tmp_path) as served:
        path = made.path(chain[1])
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        served.files.go.set()

        status, answer = await served.post("verify", {})

    assert status == 200
    (bad,) = answer["corrupt"]
    assert made.root / bad["file"] == path
    assert "checksum" in bad["reason"]
    assert (answer["files"], answer["corrupt_files"]) == (3, 1)
    assert answer["bytes"] == sum(p.stat().st_size for p in made.root.rglob("*.safetensors"))
    assert answer["seconds"] >= 0
    assert path.exists()


async def test_everything_else_goes_on_meanwhile(made: CacheFiles, tmp_path: Path) -> None:
    made.chain(1, seed=65)
    async with serving(made.root, tmp_path) as served:
        verifying = asyncio.create_task(served.post("verify", {}))
        await asyncio.to_thread(served.files.begun.wait, SOON_S)

        probed, _ = await served.post("probe", {"prompt": "AAAAx"})
        _, progress = await served.get("verify")
        second, refusal = await served.post("verify", {})
        served.files.go.set()
        first, answer = await verifying

        third, _ = await served.post("verify", {})
        _, after = await served.get("verify")

    assert probed == 200
    assert (second, refusal["error"]["code"]) == (409, "not_now")
    assert (first, answer["files"]) == (200, 1)
    assert third == 200
    assert isinstance(progress["files"], int)
    assert after == {"files": None}


async def test_who_goes_away_stops_it(made: CacheFiles, tmp_path: Path) -> None:
    made.chain(1)
    async with serving(made.root, tmp_path) as served:
        verifying = asyncio.create_task(served.post("verify", {}))
        await asyncio.to_thread(served.files.begun.wait, SOON_S)
        verifying.cancel()

        assert await asyncio.to_thread(served.files.was_stopped.wait, SOON_S)


async def test_the_end_of_the_server_stops_it(made: CacheFiles, tmp_path: Path) -> None:
    made.chain(1)
    async with serving(made.root, tmp_path) as served:
        verifying = served.cache.ask(VerifyFiles())
        await asyncio.to_thread(served.files.begun.wait, SOON_S)

    assert await asyncio.to_thread(served.files.was_stopped.wait, SOON_S)
    with pytest.raises(ActorGone):
        await verifying


async def test_without_an_ssd_tier_there_is_nothing_to_verify(
    made: CacheFiles, tmp_path: Path
) -> None:
    async with serving(made.root, tmp_path, ssd=False) as served:
        status, answer = await served.post("verify", {})

    assert (status, answer["error"]["code"]) == (409, "not_now")
    assert "no SSD tier" in answer["error"]["message"]


# ── who may ask ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["probe", "clear", "verify"])
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json", "Origin": "https://evil.example"}, 403),
        ({"Content-Type": "application/json", "Origin": "null"}, 403),
        ({"Content-Type": "application/json", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "application/json", "Host": "evil.example"}, 403),
    ],
)
async def test_a_page_elsewhere_cannot_ask(
    made: CacheFiles, tmp_path: Path, path: str, headers: dict[str, str], expected: int
) -> None:
    made.chain(1)
    async with serving(made.root, tmp_path) as served:
        url = f"{served.url}/admin/api/cache/{path}"
        body = json.dumps({"tier": "ssd", "prompt": "a"}).encode()
        async with served.http.post(url, data=body, headers=headers) as answer:
            assert answer.status == expected

        assert files_of(made.root) == 1
        assert not served.files.begun.is_set()


async def test_while_the_model_loads_there_is_nothing_to_tell(served: Served) -> None:
    served.edge.state = "loading"

    assert (await served.get("tree"))[0] == 503
    assert (await served.post("probe", {"prompt": "a"}))[0] == 503
    assert (await served.post("clear", {"tier": "all"}))[0] == 503
    assert (await served.post("verify", {}))[0] == 503


# ── omlx cache --url ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    for variable in [name for name in os.environ if name.startswith("OMLX_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("OMLX_HOME", str(tmp_path / "tool"))

    async def run(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, ["cache", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


async def test_the_tool_asks_a_server(
    made: CacheFiles, tmp_path: Path, tool: Callable[..., Any]
) -> None:
    chain = made.chain(2)
    async with serving(made.root, tmp_path) as served:
        served.files.go.set()
        url = ("--url", served.url)
        code, shown, _ = await tool("stats", *url)
        assert code == 0 and "cache.ssd_files" in shown
        code, listed, _ = await tool("ls", *url)
        assert code == 0 and [line.split()[0] for line in listed.splitlines()[1:]] == [
            name.hex()[:12] for name in chain
        ]
        code, verified, _ = await tool("verify", *url)
        assert code == 0 and "2 files" in verified and "0 corrupt" in verified
        made.path(chain[0]).write_bytes(b"rubbish")
        code, verified, _ = await tool("verify", *url, "--json")
        assert code == 1 and json.loads(verified)["corrupt_files"] == 1
        code, cleared, _ = await tool("clear", *url, "--yes", "--json")
        assert code == 0 and json.loads(cleared)["freed_blocks"] == 2
        await until_files(made.root, 0)


async def test_the_tool_sends_the_key_that_opens_the_admin_api(
    made: CacheFiles, tmp_path: Path, tool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(made.root, tmp_path, admin_key=KEY) as served:
        url = ("--url", served.url)
        code, _, problem = await tool("stats", *url)
        assert code == 2 and "OMLX_ADMIN_KEY" in problem and problem.count("\n") == 1
        assert (await tool("stats", *url, "--admin-key", KEY))[0] == 0
        monkeypatch.setenv("OMLX_ADMIN_KEY", KEY)
        assert (await tool("stats", *url))[0] == 0
        monkeypatch.setenv("OMLX_ADMIN_KEY", "sk-wrong-0123456789")
        code, _, problem = await tool("clear", *url)
        assert code == 2 and "sk-wrong" not in problem


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1",
        "file:///etc/passwd",
        "ftp://127.0.0.1",
        "127.0.0.1:8000",
        "",
        "http://[",
    ],
)
async def test_a_server_that_cannot_be_asked_is_said_in_one_line(
    tool: Callable[..., Any], url: str
) -> None:
    code, out, problem = await tool("stats", "--url", url)

    assert (code, out) == (2, "")
    assert problem.startswith("omlx: ") and problem.count("\n") == 1


async def test_a_key_follows_no_redirect(tool: Callable[..., Any]) -> None:
    asked: list[bytes] = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        port = writer.get_extra_info("sockname")[1]
        head = f"HTTP/1.1 307 Temporary\r\nLocation: http://127.0.0.1:{port}/x\r\n"
        writer.write(head.encode() + b"Content-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        code, _, problem = await tool(
            "stats", "--url", f"http://127.0.0.1:{port}", "--admin-key", KEY
        )

    assert code == 2 and "307" in problem
    assert len(asked) == 1
