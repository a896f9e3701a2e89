"""What the server admits when it starts."""

from __future__ import annotations

from pathlib import Path

from omlx.announce import WITHOUT_EFFECT
from omlx.settings import NAMES

README = Path(__file__).resolve().parent.parent / "README.md"


def test_settings_without_effect_exist_and_the_readme_says_so() -> None:
    sentence = README.read_text("utf-8").split("no effect yet")[0].rsplit("\n\n", 1)[-1]

    assert set(WITHOUT_EFFECT) <= set(NAMES)
    assert all(f"`{name}`" in sentence for name in WITHOUT_EFFECT)
