"""After a change the server proves that its cache works, and shows what a codec would cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omlx.actors.messages import CacheTree
from omlx.actors.stats_messages import RecentRequests
from omlx.cache.codecs import CODECS
from omlx.disk.block_files import BlockFiles
from tests.web.settings_desk import Desk, desk

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVERYTHING = CacheTree(64, 100)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tape(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Desk]:
    async with desk(model_path("tape"), tmp_path_factory.mktemp("home")) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hybrid(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Desk]:
    async with desk(model_path("qwen3_5"), tmp_path_factory.mktemp("home")) as opened:
        yield opened


# ── the self-test ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["behind", "selective", "through"])
async def test_a_change_of_the_cache_is_followed_by_storing_and_restoring_a_block(
    tape: Desk, policy: str
) -> None:
    answer = await tape.patch({"ssd_write_policy": policy, "ssd_pending_max_size": "7MB"})
    assert answer["self_test"] == {"state": "running"}

    outcome = await tape.tested()

    assert outcome["state"] == "ok", outcome
    assert outcome["tokens"] == 16
    assert outcome["ram_bytes"] == outcome["file_bytes"] > 0
    assert outcome["compared"] == 1
    _, whole = await tape.ask("GET")
    assert whole["self_test"] == outcome
    await tape.patch({"ssd_write_policy": None, "ssd_pending_max_size": None})


async def test_a_self_test_leaves_nothing_and_counts_as_no_request(tape: Desk) -> None:
    edge = tape.server.app.edge
    assert edge.cache is not None
    await tape.tested()
    before, tree = await tape.server.gauges(lambda _: True), await edge.cache.ask(EVERYTHING)

    await tape.tested()

    files = before["cache"]["ssd_files"]
    after = await tape.server.gauges(lambda stats: stats["cache"]["ssd_files"] == files)
    assert await edge.cache.ask(EVERYTHING) == tree
    assert after["session"] == before["session"]
    assert after["cache"]["evictions"] == before["cache"]["evictions"]
    assert json.loads(await edge.stats.ask(RecentRequests(10))) == {"requests": []}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("storage", ["ssd_sidecar", "embedded"])
async def test_checkpoints_are_tested_with_the_codec_and_the_storage_in_force(
    hybrid: Desk, codec: str, storage: str
) -> None:
    await hybrid.patch({"gdn_sidecar_state_dtype": codec, "gdn_snapshot_storage": storage})

    outcome = await hybrid.tested()

    assert outcome["state"] == "ok", outcome
    assert outcome["compared"] == 2  # a block, and the state at its end


@pytest.mark.parametrize("model", ["gemma3", "llama-bf16", "qwen3_next"])
async def test_every_kind_of_layer_is_stored_and_restored(
    model: str, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    async with desk(model_path(model), tmp_path) as opened:
        outcome = await opened.tested()

    assert outcome["state"] == "ok", outcome
    assert outcome["compared"] >= 1


@pytest.mark.parametrize("off", ["hot_cache_max_size", "ssd_cache_max_size"])
async def test_one_tier_alone_is_tested_by_itself(tape: Desk, off: str) -> None:
    await tape.patch({off: "0"})

    outcome = await tape.tested()

    assert outcome["state"] == "ok", outcome
    assert (outcome["ram_bytes"] > 0, outcome["file_bytes"] > 0) == (
        off == "ssd_cache_max_size",
        off == "hot_cache_max_size",
    )
    await tape.patch({off: None})


async def test_a_file_that_gives_other_bytes_fails_the_test_by_name(
    tape: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = BlockFiles.read

    def other(self: BlockFiles, expected: Any) -> Any:
        first, *rest = read(self, expected)
        changed = bytes(first.data[:-1]) + bytes([first.data[-1] ^ 1])
        return (type(first)(first.name, first.dtype, first.shape, memoryview(changed)), *rest)

    monkeypatch.setattr(BlockFiles, "read", other)

    outcome = await tape.tested()

    assert (outcome["state"], outcome["reason"]) == ("failed", "differs")
    assert outcome["detail"] == "kv0.keys"


async def test_a_file_that_can_not_be_written_fails_the_test(
    tape: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("omlx.web.self_test.FILE_S", 0.5)
    monkeypatch.setattr(BlockFiles, "write", broken)

    outcome = await tape.tested()

    assert (outcome["state"], outcome["reason"]) == ("failed", "no_file")


async def test_without_any_tier_there_is_nothing_to_test(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    async with desk(model_path("tape"), tmp_path, cache_enabled=False) as off:
        outcome = await off.tested()

    assert (outcome["state"], outcome["reason"]) == ("skipped", "off")


# ── the codec preview ────────────────────────────────────────────────────────────────────────


async def test_the_preview_shows_what_each_codec_costs_on_a_real_state(hybrid: Desk) -> None:
    status, answer = await hybrid.ask("POST", "/admin/api/gdn/preview", {})

    assert status == 200, answer
    rows = {row["codec"]: row for row in answer["rows"]}
    assert tuple(rows) == CODECS
    exact = rows["fp32"]
    assert (exact["rel_error"], exact["kl"], exact["agree"], exact["ratio"]) == (0, 0, 1, 1)
    for row in rows.values():
        assert 0 <= row["rms_error"] <= row["max_error"]
        assert 0 <= row["kl"] <= row["kl_max"]
        assert row["encode_ms"] >= 0 and row["decode_ms"] >= 0
    assert 0 < rows["rht_int16"]["rel_error"] < rows["bf16"]["rel_error"] < 2**-8
    assert rows["rht_int8"]["rel_error"] < 2e-2
    assert rows["int8"]["bytes"] < rows["bf16"]["bytes"] < exact["bytes"]
    assert answer["compared_tokens"] == 32


async def test_a_preview_disturbs_no_request_beside_it(hybrid: Desk) -> None:
    alone = await hybrid.server.chat("tell me", max_tokens=24)
    together, _ = await asyncio.gather(
        hybrid.server.chat("tell me", max_tokens=24, cache_salt="apart"),
        hybrid.ask("POST", "/admin/api/gdn/preview", {}),
    )

    assert together["choices"][0]["message"] == alone["choices"][0]["message"]


async def test_a_preview_that_fails_harms_nobody(
    hybrid: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr("omlx.engine.state_preview.StatePreview._score", broken)
        status, answer = await hybrid.ask("POST", "/admin/api/gdn/preview", {})

    assert (status, answer["error"]["code"]) == (503, "busy")
    assert "RuntimeError" in answer["error"]["message"]
    assert (await hybrid.server.chat("still there?", max_tokens=4))["choices"]


async def test_a_model_without_recurrent_layers_has_no_preview_and_a_sentence(tape: Desk) -> None:
    status, answer = await tape.ask("POST", "/admin/api/gdn/preview", {})

    assert (status, answer["error"]["code"]) == (409, "no_recurrent_layers")
    assert "no recurrent layers" in answer["error"]["message"]
