"""What several folders of tests share: the tiny models, each built once for each process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, by name; see tests/tiny.py."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def built(name: str) -> Path:
        from tests import tiny  # imports MLX, which most tests do not need

        return tiny.build(name, folder)

    return built
