"""Each route of the API is in the README, and none there is made up."""

from __future__ import annotations

import re
from pathlib import Path

from omlx.settings import load_settings
from omlx.web.auth import is_admin
from omlx.web.edge import Edge
from omlx.web.server import make_app

README = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")


def api_routes(home: Path) -> set[tuple[str, str]]:
    """Method and path of each route that programs call, without the aliases of those in /v1."""
    app = make_app(Edge(load_settings({}, {}, home), stats=None))  # pyright: ignore
    found = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    found = {(m, p) for m, p in found if not is_admin(p) and not p.startswith("/static")}
    return {(m, p) for m, p in found if p.startswith("/v1") or (m, f"/v1{p}") not in found}


def documented() -> set[tuple[str, str]]:
    section = README.split("## API\n")[1].split("\n## ")[0]
    return set(re.findall(r"`(GET|POST) (/[^`]*)`", section))


def test_every_route_is_in_the_readme(tmp_path: Path) -> None:
    assert documented() == api_routes(tmp_path)
