"""What every handler needs, in one place: the settings, the actors' addresses, and the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from omlx.core.usage import ModelFacts
from omlx.kernel.mailbox import Ref
from omlx.settings import Loaded


@dataclass
class Edge:
    """Filled by ``app.py``. ``scheduler`` and the rest are None until the model is loaded."""

    loaded: Loaded
    stats: Ref[Any]
    tokenizer: Ref[Any] | None = None
    scheduler: Ref[Any] | None = None
    cache: Ref[Any] | None = None
    model: ModelFacts = field(default_factory=ModelFacts)
    max_context: int = 0
    vocab_size: int = 0
    decode_token: Callable[[int], str] = str
    """The text of one token, for log-probabilities."""
    started_at: float = 0.0
    """Unix seconds."""
    state: str = "loading"
    """loading, ready, stopping"""

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self.scheduler is not None


EDGE: web.AppKey[Edge] = web.AppKey("edge", Edge)
