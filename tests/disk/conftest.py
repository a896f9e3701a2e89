"""No test leaves a directory locked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.disk.faulty import release_all


@pytest.fixture(autouse=True)
def nothing_stays_locked() -> Iterator[None]:
    yield
    release_all()
