"""Where the files that are no code lie: in the installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: str) -> Path:
    """The folder ``name``: templates or static. Raises FileNotFoundError naming where it looked."""
    places = (PACKAGE / f"_{name}", PACKAGE.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"there is neither {places[0]} nor {places[1]}; install omlx again")
