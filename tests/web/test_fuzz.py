"""A thousand requests made from the server's own description, right and wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.fuzz_api import fuzz
from tests import talker
from tests.process import Server

pytestmark = pytest.mark.slow

CASES = 1000


def test_no_request_makes_it_fail_or_answer_out_of_shape(tmp_path: Path) -> None:
    model = talker.build(tmp_path)
    with Server(model, tmp_path / "home", "--max-context", "128") as server:
        server.wait_ready()

        found = fuzz(server.url, CASES, first_seed=1)

        server.stop()
    assert found.wrong == []
    assert found.cases >= CASES
    assert found.statuses.keys() == {200, 400, 404}
    assert found.statuses[200] >= CASES // 5, "most was refused before it reached the engine"
    assert found.streams >= CASES // 50
