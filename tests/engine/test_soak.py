"""Every answer is its no-cache answer, whatever is shared, evicted, cancelled and read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from omlx.engine.load import LoadedModel
from tests.engine.soaking import Soak

Loaded = Callable[[str], LoadedModel]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(("cold", "ahead"), [(False, True), (True, False)], ids=["ram", "files"])
def test_every_answer_is_its_no_cache_answer(
    loaded: Loaded, name: str, cold: bool, ahead: bool, tmp_path: Path
) -> None:
    """B64, B67: also over a restart, where there are files."""
    soak = Soak(loaded(name), seed=7, files=tmp_path if cold else None, ahead=ahead)

    soak.run(requests=20)
    if cold:
        soak.begin_life()
        soak.run(requests=10)

    assert soak.checked >= 20 + 10 * cold
    assert soak.cancelled > 0
    assert soak.reused_tokens > 0
