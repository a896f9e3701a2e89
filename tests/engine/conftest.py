"""Tiny models as the server loads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from omlx.engine.load import LoadedModel, load


@pytest.fixture(scope="session")
def loaded(model_path: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """A tiny model by name, loaded once."""
    return cache(lambda name: load(model_path(name), 1 << 30))
