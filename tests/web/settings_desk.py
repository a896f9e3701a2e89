"""A server whose settings stand in its file, and somebody at its settings' API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.web.serving import Server, serving

KEY = "sk-settings-0123456789"
URL = "/admin/api/settings"


@dataclass
class Desk:
    server: Server
    home: Path

    async def ask(
        self, method: str, path: str = URL, body: object = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        url = f"{self.server.url}{path}"
        given = {"Authorization": f"Bearer {KEY}", **headers}
        async with self.server.http.request(method, url, json=body, headers=given) as answer:
            return answer.status, await answer.json()

    async def patch(self, changes: Mapping[str, object]) -> dict[str, Any]:
        status, answer = await self.ask("PATCH", body=changes)
        assert status == 200, answer
        return answer

    async def refused(self, changes: Mapping[str, object]) -> tuple[int, str, str]:
        """Status, field and sentence of a change that is not taken."""
        before = await self.rows()
        status, answer = await self.ask("PATCH", body=changes)
        assert status >= 400, answer
        assert await self.rows() == before, "nothing is applied unless all of it is"
        return status, answer["error"]["param"], answer["error"]["message"]

    async def rows(self) -> dict[str, dict[str, Any]]:
        status, answer = await self.ask("GET")
        assert status == 200, answer
        return answer["settings"]

    async def tested(self) -> dict[str, Any]:
        """The outcome of a test that began now: one may be under way since the last change."""
        _, whole = await self.ask("GET")
        if whole["self_test"] == {"state": "running"}:
            await self.ask("POST", f"{URL}/self-test", {})
        status, answer = await self.ask("POST", f"{URL}/self-test", {})
        assert status == 200, answer
        return answer

    def stored(self) -> dict[str, Any]:
        return json.loads((self.home / "settings.json").read_text())


@asynccontextmanager
async def desk(model: Path, home: Path, **settings: Any) -> AsyncIterator[Desk]:
    async with serving(model, home, in_file=True, **settings) as server:
        yield Desk(server, home)
