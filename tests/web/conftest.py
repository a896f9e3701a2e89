"""One server for each module of tests; its loop is the module's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.web.serving import Server, serving

if TYPE_CHECKING:
    from playwright.async_api import Browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    """Serves the tape model; see tests/tiny.py."""
    home = tmp_path_factory.mktemp("home")
    async with serving(model_path("tape"), home, max_concurrent_requests=4) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Chromium, one for each module of tests; its pages are strangers to each other."""
    from tests.web.browsing import chromium  # most tests here need none

    async with chromium() as launched:
        yield launched
