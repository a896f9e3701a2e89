"""The settings page's API: what is stored, what is in force, and changing it.

A change is checked as a start would check it, written to the settings file, told to those who go
by it, and then read back from them: the answer says what they answered. Who may ask, and from
where, is settled before (``auth``).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from omlx.actors.stats_messages import SettingsChanged
from omlx.kernel.message import ActorGone, Rejected
from omlx.settings import (
    LIVE,
    SECRETS,
    Loaded,
    SettingsError,
    apply_class,
    constraints,
    default_text,
    env_name,
    flag,
    in_order,
    kind_of,
    plain_value,
    reread,
    save_settings_file,
    section_of,
    unit_and_description,
)
from omlx.web.admin import JSON_HEADERS
from omlx.web.auth import COOKIE, admin_key, cookie_value
from omlx.web.codec_preview import NoStates, TooShort, preview
from omlx.web.edge import EDGE, Edge, InForce, RunningSettings
from omlx.web.errors import ApiError, invalid, json_response
from omlx.web.generation import check_ready
from omlx.web.pages import add_page
from omlx.web.self_test import Outcome, self_test

TESTED = frozenset(
    {
        "hot_cache_max_size",
        "ssd_cache_max_size",
        "ssd_free_space_floor",
        "ssd_write_policy",
        "ssd_pending_max_size",
        "gdn_snapshot_storage",
        "gdn_sidecar_state_dtype",
        "gdn_ssd_pending_max_size",
    }
)
"""After a change of one of these a block is stored and restored."""

STATUS = {"locked": 409, "broken_file": 409}
"""By the code of a SettingsError; the others are 422."""

NO_ANSWER = (Rejected, ActorGone, TimeoutError)


@dataclass
class Desk:
    """One change at a time, one self-test, one preview."""

    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    previewing: asyncio.Lock = field(default_factory=asyncio.Lock)
    testing: asyncio.Task[Outcome] | None = None
    tested: Outcome | None = None
    """The last outcome."""


DESK: web.AppKey[Desk] = web.AppKey("settings", Desk)


def add_settings(app: web.Application) -> None:
    app[DESK] = Desk()
    add_page(app, "/admin/settings", "settings")
    app.router.add_get("/admin/api/settings", show)
    app.router.add_patch("/admin/api/settings", change)
    app.router.add_post("/admin/api/settings/validate", validate)
    app.router.add_post("/admin/api/settings/self-test", run_self_test)
    app.router.add_post("/admin/api/gdn/preview", codec_preview)
    app.on_cleanup.append(_stop_testing)


# ── what is stored, and what is in force ─────────────────────────────────────────────────────


async def show(request: web.Request) -> web.Response:
    return _answer(await _overview(request.app[EDGE], request.app[DESK]))


async def _overview(edge: Edge, desk: Desk) -> dict[str, Any]:
    running, problem = edge.loaded, None
    try:
        stored = await asyncio.to_thread(reread, running)
    except SettingsError as error:
        stored, problem = running, str(error)
    found = await _ask_owners(edge)
    return {
        "settings": {name: _row(name, stored, running, found) for name in in_order()},
        "file": str(running.home / "settings.json"),
        "file_error": problem,
        "warnings": list(stored.warnings),
        "state": edge.state,
        "model": {
            "id": edge.model.id,
            "recurrent": any(spec.is_recurrent for spec in edge.codec_states),
            "checkpoint_bytes": sum(spec.nbytes for spec in edge.codec_states),
        },
        "self_test": _tested(desk),
    }


async def _ask_owners(edge: Edge) -> dict[str, InForce] | None:
    """None while they are not there, or do not answer."""
    if edge.running_settings is None:
        return None
    try:
        return await edge.running_settings.read(LIVE)
    except NO_ANSWER:
        return None


def _row(
    name: str, stored: Loaded, running: Loaded, found: dict[str, InForce] | None
) -> dict[str, Any]:
    source = stored.sources[name]
    unit, description = unit_and_description(name)
    apply = apply_class(name)
    is_same = getattr(stored.settings, name) == getattr(running.settings, name)
    owner = None if found is None else found.get(name)
    confirmed = None if owner is None and name in LIVE else owner is None or owner.confirmed
    in_force = plain_value(running.settings, name)
    if owner is not None and not owner.confirmed and name not in SECRETS:
        in_force = str(owner.value)
    # What "20%" or "auto" comes to.
    resolves = kind_of(name) == "size" or name == "gdn_snapshot_storage"
    held = owner.value if owner is not None and resolves else None
    return {
        "value": plain_value(stored.settings, name),
        "default": default_text(name),
        "source": source.kind,
        "locked_by": source.detail if source.kind in ("env", "cli") else None,
        "apply": apply,
        "unit": unit,
        "constraints": constraints(name),
        "section": section_of(name),
        "kind": kind_of(name),
        "description": description,
        "env": env_name(name),
        "flag": flag(name),
        "running": in_force,
        "held": held if isinstance(held, int | str) else None,
        "confirmed": confirmed,
        "needs": _needs(name, is_same=is_same, confirmed=confirmed),
    }


def _needs(name: str, *, is_same: bool, confirmed: bool | None) -> str | None:
    """What it takes for the stored value to be in force; None: nothing."""
    if not is_same:
        return "reload" if apply_class(name) == "reload" else "restart"
    return "restart" if confirmed is False else None


# ── changing it ──────────────────────────────────────────────────────────────────────────────


async def change(request: web.Request) -> web.Response:
    edge, desk = request.app[EDGE], request.app[DESK]
    changes = _changes(await request.read())
    check_ready(edge)
    owners = edge.running_settings
    assert owners is not None, "a ready server has its actors"
    key = admin_key(edge.loaded.settings)
    # What was written is carried out, and the next change waits for it: who asked may go away.
    await asyncio.shield(asyncio.ensure_future(_carry_out(owners, edge, desk, changes)))
    overview = await _overview(edge, desk)
    rows = {name: overview["settings"][name] for name in changes}
    edge.stats.offer(SettingsChanged(tuple(changes), time.time()))
    if TESTED.intersection(changes):
        _begin_test(edge, desk)
    answer = _answer(
        {
            "applied": [name for name, row in rows.items() if row["needs"] is None],
            "needs_reload": [name for name, row in rows.items() if row["needs"] == "reload"],
            "needs_restart": [name for name, row in rows.items() if row["needs"] == "restart"],
            "unconfirmed": [name for name, row in rows.items() if row["confirmed"] is None],
            "settings": rows,
            "warnings": overview["warnings"],
            "self_test": _tested(desk),
        }
    )
    _keep_signed_in(request, answer, key, admin_key(edge.loaded.settings))
    return answer


async def _carry_out(
    owners: RunningSettings, edge: Edge, desk: Desk, changes: dict[str, object]
) -> None:
    """Check, store, tell. Raises ApiError, and then nothing has changed."""
    async with desk.changing:
        in_force = await _store(owners, edge.loaded, changes)
        # An actor that is being restarted is built with it; until then it is unconfirmed.
        with suppress(*NO_ANSWER):
            await owners.apply(in_force)


async def _store(owners: RunningSettings, running: Loaded, changes: dict[str, object]) -> Loaded:
    """Check as a start would, and write. Returns what is to be in force."""
    try:
        stored = await asyncio.to_thread(_checked, running, changes)
        # What is not saved with this change, but by hand, waits for a restart like anybody's edit.
        in_force = running.taking_over(stored, [name for name in changes if name in LIVE])
        await owners.check(stored, changes)
        await asyncio.to_thread(save_settings_file, running.home, changes)
    except SettingsError as error:
        raise _refused(error) from None
    except OSError as error:
        raise ApiError(
            507,
            f"The settings file can't be written: {error.strerror or error}.",
            kind="server_error",
            code="not_written",
        ) from None
    return in_force


def _checked(running: Loaded, changes: dict[str, object]) -> Loaded:
    return reread(running).changed(changes)


def _changes(raw: bytes) -> dict[str, object]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The body is not valid JSON: {error}.", None, "invalid_json") from None
    if not isinstance(body, dict) or not body:
        raise invalid('Send an object such as {"hot_cache_max_size": "4GB"}.', None, "invalid_json")
    for name in SECRETS.intersection(body):
        if body[name] == "set":
            raise _refused(
                SettingsError(
                    f'{name}: "set" only stands for a key that is not shown. '
                    "Leave it out to keep the key.",
                    name,
                )
            )
    return body


def _refused(error: SettingsError) -> ApiError:
    return ApiError(STATUS.get(error.code, 422), str(error), param=error.name, code=error.code)


def _keep_signed_in(
    request: web.Request, answer: web.Response, before: str | None, now: str | None
) -> None:
    """Whoever changed the key from a page has proved to know it."""
    if now != before and now is not None and request.headers.get("Sec-Fetch-Site"):
        answer.set_cookie(COOKIE, cookie_value(now), httponly=True, samesite="Strict", path="/")


async def validate(request: web.Request) -> web.Response:
    """The sentence for each value that would be refused, as PATCH would say it. Changes nothing."""
    running = request.app[EDGE].loaded
    changes = _changes(await request.read())
    return _answer({"errors": await asyncio.to_thread(_all_errors, running, changes)})


def _all_errors(running: Loaded, changes: dict[str, object]) -> dict[str, dict[str, str]]:
    """Each change by itself, and if these are well, all together."""
    errors: dict[str, dict[str, str]] = {}
    for some in [*({name: value} for name, value in changes.items()), changes]:
        try:
            if some is not changes or not errors:
                _checked(running, some)
        except SettingsError as error:
            # A fault of several values is shown at one that was changed.
            name = error.name if error.name in some else next(iter(some))
            errors[str(name)] = {"message": str(error), "code": error.code}
    return errors


# ── proving it ───────────────────────────────────────────────────────────────────────────────


async def run_self_test(request: web.Request) -> web.Response:
    """Make the test, or wait for the one that is under way."""
    edge, desk = request.app[EDGE], request.app[DESK]
    check_ready(edge)
    outcome = await asyncio.shield(_begin_test(edge, desk))
    return _answer(outcome.as_json())


def _begin_test(edge: Edge, desk: Desk) -> asyncio.Task[Outcome]:
    if desk.testing is None or desk.testing.done():

        async def test() -> Outcome:
            desk.tested = await self_test(edge)
            return desk.tested

        desk.testing = asyncio.create_task(test(), name="self-test")
    return desk.testing


def _tested(desk: Desk) -> dict[str, Any] | None:
    if desk.testing is not None and not desk.testing.done():
        return {"state": "running"}
    return None if desk.tested is None else desk.tested.as_json()


async def _stop_testing(app: web.Application) -> None:
    testing = app[DESK].testing
    if testing is not None:
        testing.cancel()
        await asyncio.wait({testing})


async def codec_preview(request: web.Request) -> web.Response:
    edge, desk = request.app[EDGE], request.app[DESK]
    check_ready(edge)
    if desk.previewing.locked():
        raise ApiError(409, "A codec preview is under way already.", code="busy")
    async with desk.previewing:
        try:
            return _answer(await preview(edge))
        except NoStates:
            raise ApiError(
                409,
                f"{edge.model.id} has no recurrent layers, so no codec is ever used with it.",
                code="no_recurrent_layers",
            ) from None
        except TooShort:
            raise ApiError(
                409, "The model's context is too short for a preview.", code="context_too_short"
            ) from None
        except NO_ANSWER as error:
            raise ApiError(
                503,
                f"The preview could not be made: {error}.",
                kind="server_error",
                code="busy",
                headers={"Retry-After": "2"},
            ) from None


def _answer(body: dict[str, Any]) -> web.Response:
    return json_response(body, headers=JSON_HEADERS)
