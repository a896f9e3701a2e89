"""Settings are changed as a start would read them, by one who may; the server says what is so."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from omlx.actors.limit_messages import SetLimits, SetPace
from omlx.actors.stats_messages import Feed
from omlx.live_settings import READERS
from omlx.settings import (
    LIVE,
    NAMES,
    SECRETS,
    SettingsError,
    constraints,
    kind_of,
    load_settings,
    plain_value,
    section_of,
)
from omlx.settings.sections import SECTIONS, in_order
from tests.process import free_port
from tests.sim.world import Break
from tests.web.serving import SOON_S, serving
from tests.web.settings_desk import KEY, URL, Desk, desk

MB = 1_000_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tape(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Desk]:
    async with desk(model_path("tape"), tmp_path_factory.mktemp("home")) as opened:
        yield opened


def another(name: str, now: object, folder: Path, models: Callable[[str], Path]) -> object:
    """A value that the setting may have, other than ``now``; what a start needs is there."""
    limits = constraints(name)
    by_name = {
        "host": "localhost",
        "port": free_port(),
        "model": str(models("llama")),
        "ssd_cache_dir": str(folder / "other-cache"),
        "allowed_hosts": ["omlx.example"],
        "cors_origins": ["https://chat.example"],
        "paged_cache_block_size": 32,
    }
    by_kind: dict[str, Callable[[], object]] = {
        "switch": lambda: not now,
        "choice": lambda: next(c for c in reversed(limits["choices"]) if c != now),
        "whole": lambda: next(n for n in (limits["min"] + 11, limits["max"] - 1) if n != now),
        "number": lambda: limits["min"] + 0.25,
        "size": lambda: "77MB",
        "pairs": lambda: {"mine": "theirs"},
        "folder": lambda: str(folder / name),
        "secret": lambda: KEY,
    }
    return by_name[name] if name in by_name else by_kind[kind_of(name)]()


# ── every setting ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_saved_is_confirmed_by_its_owner_and_survives_a_start(
    tape: Desk, name: str, tmp_path: Path, model_path: Callable[[str], Path]
) -> None:
    before = (await tape.rows())[name]
    wanted = another(name, before["value"], tmp_path, model_path)
    shown = "set" if name in SECRETS else wanted
    kept = tape.stored().get(name)

    answer = await tape.patch({name: wanted})

    row = answer["settings"][name]
    assert (row["value"], row["source"], row["locked_by"]) == (shown, "file", None)
    if name in LIVE:
        assert answer["applied"] == [name]
        assert (row["confirmed"], row["needs"], row["running"]) == (True, None, shown)
    else:
        assert answer["applied"] == []
        assert name in [*answer["needs_reload"], *answer["needs_restart"]]
        assert row["running"] == before["running"]
    # A start reads the same.
    assert plain_value(load_settings({}, {}, tape.home).settings, name) == shown
    # And back.
    back = await tape.patch({name: kept})
    assert back["settings"][name]["value"] == before["value"]
    assert back["settings"][name]["needs"] is None
    assert tape.stored().get(name) == kept


@pytest.mark.asyncio(loop_scope="module")
async def test_everything_that_was_accepted_starts_again(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    async with desk(model_path("tape"), tmp_path / "home") as first:
        rows = await first.rows()
        wanted = {n: another(n, rows[n]["value"], tmp_path, model_path) for n in rows}
        wanted["cache_enabled"] = True  # or most of the others would have no effect
        await first.patch(wanted)

    async with desk(model_path("tape"), tmp_path / "home") as second:
        rows = await second.rows()

        for name, row in rows.items():
            assert row["value"] == ("set" if name in SECRETS else wanted[name]), name
            assert (row["confirmed"], row["needs"]) == (True, None), name


@pytest.mark.asyncio(loop_scope="module")
async def test_a_page_gets_all_that_it_shows_of_each(tape: Desk) -> None:
    rows = await tape.rows()

    assert set(rows) == set(NAMES)
    for name, row in rows.items():
        assert row["section"] in SECTIONS
        assert row["env"] == f"OMLX_{name.upper()}"
        assert row["constraints"]["text"]
        assert row["description"]


def test_what_handlers_read_from_the_edge_they_really_read_there() -> None:
    """A live setting is confirmed by whoever goes by it; see ``READERS``."""
    import omlx.web

    sources = [p.read_text() for p in Path(next(iter(omlx.web.__path__))).glob("*.py")]
    for name in set(LIVE) - READERS.keys():
        used = re.compile(rf"settings\.{name}\b|settings\b.*\.{name}\b|_plain\(settings\.{name}")
        assert any(used.search(source) for source in sources), name


def test_sections_hold_every_setting_once() -> None:
    assert sorted(in_order()) == sorted(NAMES)
    named = [name for names in SECTIONS.values() for name in names]
    assert len(named) == len(set(named))
    assert all(section_of(name) in SECTIONS for name in NAMES)


# ── who may change what ──────────────────────────────────────────────────────────────────────


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_variable_or_a_flag_sets_is_locked_and_named(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    variables = {"OMLX_HOT_CACHE_MAX_SIZE": "5MB"}
    async with serving(model_path("tape"), tmp_path, variables=variables) as server:
        locked = Desk(server, tmp_path)

        rows = await locked.rows()

        assert rows["hot_cache_max_size"]["locked_by"] == "OMLX_HOT_CACHE_MAX_SIZE"
        assert rows["hot_cache_max_size"]["source"] == "env"
        assert rows["paged_cache_block_size"]["locked_by"] == "--paged-cache-block-size"
        for name, by in (
            ("hot_cache_max_size", "OMLX_HOT_CACHE_MAX_SIZE"),
            ("paged_cache_block_size", "--paged-cache-block-size"),
        ):
            for value in ("64", None):
                status, field, sentence = await locked.refused({name: value, "decode_share": 0.25})
                assert (status, field) == (409, name)
                assert by in sentence
        assert not (tmp_path / "settings.json").exists()


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PATCH", URL),
        ("POST", f"{URL}/validate"),
        ("POST", f"{URL}/self-test"),
        ("POST", "/admin/api/gdn/preview"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_other_sites_change_nothing(
    tape: Desk, method: str, path: str, headers: dict[str, str]
) -> None:
    status, answer = await tape.ask(method, path, {"log_level": "debug"}, **headers)

    assert (status, answer["error"]["code"]) == (403, "foreign_origin")
    assert (await tape.rows())["log_level"]["value"] == "info"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_form_changes_nothing(tape: Desk) -> None:
    url = f"{tape.server.url}{URL}"
    async with tape.server.http.patch(url, data={"log_level": "debug"}) as answer:
        assert answer.status == 415


@pytest.mark.asyncio(loop_scope="module")
async def test_keys_are_never_told_and_never_replaced_by_their_stand_in(tape: Desk) -> None:
    answer = await tape.patch({"api_key": KEY})
    _, whole = await tape.ask("GET")
    assert KEY not in json.dumps(answer) + json.dumps(whole)
    assert whole["settings"]["api_key"]["value"] == "set"

    status, field, sentence = await tape.refused({"api_key": "set"})

    assert (status, field) == (422, "api_key")
    assert "keep" in sentence
    async with tape.server.http.get(f"{tape.server.url}{URL}") as closed:
        assert closed.status == 401  # in force at once
    await tape.patch({"api_key": None})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_page_that_sets_the_key_stays_signed_in(tape: Desk) -> None:
    url, same = f"{tape.server.url}{URL}", {"Sec-Fetch-Site": "same-origin"}
    async with tape.server.http.patch(url, json={"admin_key": KEY}, headers=same) as answer:
        assert answer.status == 200
        cookie = answer.cookies["omlx_admin"]

    async with tape.server.http.get(url, cookies={"omlx_admin": cookie.value}) as answer:
        assert answer.status == 200
    assert KEY not in cookie.value
    await tape.patch({"admin_key": None})
    tape.server.http.cookie_jar.clear()


# ── what is refused ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("hot_cache_max_size", "much", "this is no size"),
        ("hot_cache_max_size", "101%", "must not exceed 100%"),
        ("hot_cache_max_size", -1, "must not be negative"),
        ("paged_cache_block_size", 100, "power of two"),
        ("gdn_sidecar_state_dtype", "fp8", "fp32, bf16, int8, rht_int8, rht_int16"),
        ("max_concurrent_requests", 0, "from 1 to 1024"),
        ("decode_share", 1, "below 1"),
        ("cors_origins", ["chat.example"], "scheme://host"),
        ("port", 70000, "65535"),
        ("ssd_cache_dir", "/", "the whole volume"),
        ("ssd_cache_dir", "/proc/omlx", "can't be used"),
        ("model", "/nowhere/at/all", "/nowhere/at/all"),
        ("model", "org/not-fetched", "omlx pull org/not-fetched"),
        ("host", "192.0.2.1", "key is set"),
        ("no_such_setting", 1, "is not a setting"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_bad_value_gets_its_sentence_and_changes_nothing(
    tape: Desk, name: str, value: object, says: str
) -> None:
    status, field, sentence = await tape.refused({name: value, "log_level": "debug"})

    assert (status, field) == (422, name)
    assert says in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("value", ["much", "101%", "5 XB", ""])
@pytest.mark.asyncio(loop_scope="module")
async def test_validating_says_what_saving_would(tape: Desk, value: str) -> None:
    changes = {"hot_cache_max_size": value, "log_level": "debug", "decode_share": 7}

    status, answer = await tape.ask("POST", f"{URL}/validate", changes)

    assert status == 200
    assert set(answer["errors"]) == {"hot_cache_max_size", "decode_share"}
    for name in answer["errors"]:
        _, _, sentence = await tape.refused({name: changes[name]})
        assert answer["errors"][name]["message"] == sentence
    assert (await tape.rows())["log_level"]["value"] == "info"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_port_that_is_taken_is_refused_now_and_not_at_the_next_start(tape: Desk) -> None:
    other = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    async with other:
        port = other.sockets[0].getsockname()[1]

        _, field, sentence = await tape.refused({"port": port})

    assert (field, f"{port} on 127.0.0.1" in sentence) == ("port", True)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_key_of_a_server_that_others_reach_can_not_be_taken_away(tmp_path: Path) -> None:
    """Even together with its address, which only a restart changes."""
    flags = {"host": "0.0.0.0", "api_key": KEY}
    running = load_settings(flags, {}, tmp_path)
    stored = load_settings({}, {}, tmp_path)

    with pytest.raises(SettingsError, match="no key is set"):
        running.taking_over(stored, LIVE)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_file_that_cannot_be_written_leaves_everything_as_it_was(
    tape: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)

    status, _, sentence = await tape.refused({"decode_share": 0.125})

    assert status == 507
    assert "No space left" in sentence


@pytest.mark.asyncio(loop_scope="module")
async def test_an_edit_by_hand_waits_for_a_restart_and_is_not_lost(tape: Desk) -> None:
    path = tape.home / "settings.json"
    path.write_text(json.dumps({**tape.stored(), "max_queued_requests": 5}))

    row = (await tape.rows())["max_queued_requests"]
    assert (row["value"], row["running"], row["needs"]) == (5, 64, "restart")
    await tape.patch({"decode_share": 0.25})
    assert tape.stored()["max_queued_requests"] == 5
    assert (await tape.rows())["max_queued_requests"]["running"] == 64

    answer = await tape.patch({"max_queued_requests": None, "decode_share": None})
    assert sorted(answer["applied"]) == ["decode_share", "max_queued_requests"]


# ── in force ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.asyncio(loop_scope="module")
async def test_numbers_are_read_back_from_the_actors_themselves(tape: Desk) -> None:
    edge = tape.server.app.edge
    assert edge.cache is not None and edge.scheduler is not None
    await tape.patch(
        {"hot_cache_max_size": "3MB", "ssd_free_space_floor": "1GB", "max_concurrent_requests": 3}
    )

    limits, pace = await edge.cache.ask(SetLimits()), await edge.scheduler.ask(SetPace())
    assert limits.hot_bytes == 3 * MB
    assert limits.writing is not None and limits.writing.floor_bytes == 1000 * MB
    assert pace.limits.max_running == 3

    # Somebody else changes it behind our back: the page does not repeat what was saved.
    await edge.cache.ask(SetLimits(hot_bytes=2 * MB))
    row = (await tape.rows())["hot_cache_max_size"]
    assert (row["confirmed"], row["running"], row["needs"]) == (False, str(2 * MB), "restart")
    await tape.patch(
        {
            "hot_cache_max_size": None,
            "ssd_free_space_floor": None,
            "max_concurrent_requests": None,
        }
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_an_actor_that_crashed_comes_back_with_what_was_set_last(tape: Desk) -> None:
    edge = tape.server.app.edge
    assert edge.cache is not None
    await tape.patch({"hot_cache_max_size": "3MB", "max_queued_requests": 9})

    edge.cache.offer(Break())

    async with asyncio.timeout(SOON_S):
        while True:
            rows = await tape.rows()
            if rows["hot_cache_max_size"]["confirmed"] is not None:
                break
    for name, value in (("hot_cache_max_size", "3MB"), ("max_queued_requests", 9)):
        assert (rows[name]["running"], rows[name]["confirmed"]) == (value, True)
    await tape.patch({"hot_cache_max_size": None, "max_queued_requests": None})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tier_that_was_off_at_the_start_needs_a_restart(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    async with desk(model_path("tape"), tmp_path, ssd_cache_max_size="0") as off:
        answer = await off.patch({"ssd_cache_max_size": "1GB"})

        assert answer["needs_restart"] == ["ssd_cache_max_size"]
        assert answer["settings"]["ssd_cache_max_size"]["running"] == "0"

    async with desk(model_path("tape"), tmp_path) as on:
        assert (await on.rows())["ssd_cache_max_size"]["held"] == 1000 * MB


@pytest.mark.asyncio(loop_scope="module")
async def test_a_change_is_an_event_for_those_who_look(tape: Desk) -> None:
    async with await tape.server.app.edge.stats.ask(Feed()) as feed:
        await tape.patch({"log_level": "warning"})
        changes = (frame async for frame in feed if frame.startswith("event: settings"))
        async with asyncio.timeout(SOON_S):
            event = await anext(changes)
        await tape.patch({"log_level": None})

    assert json.loads(event.split("data: ")[1])["names"] == ["log_level"]
