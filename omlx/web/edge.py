"""What every handler needs, in one place: the settings, the actors' addresses, and the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from omlx.cache.hybrid_cache import StateSpec
from omlx.core.markup import ModelMarkup
from omlx.core.tool_calls import Parser
from omlx.core.usage import ModelFacts
from omlx.kernel.mailbox import Ref
from omlx.settings import Loaded
from omlx.web.captures import Captures


@dataclass(frozen=True, slots=True)
class InForce:
    """What the owner of a setting says of it."""

    confirmed: bool
    """It is what the settings say."""
    value: object
    """As the owner holds it: a number of bytes where the setting is a share, for one."""


class RunningSettings(Protocol):
    """The settings of the running server, and who goes by them."""

    loaded: Loaded
    """What was told to them last."""

    async def check(self, changed: Loaded, names: Iterable[str]) -> None:
        """Raises SettingsError when a start with these would fail, because of one of ``names``."""

    async def apply(self, loaded: Loaded) -> None:
        """Tell everyone. Raises ActorGone, Rejected or TimeoutError when one does not listen."""

    async def read(self, names: Iterable[str]) -> dict[str, InForce]:
        """Ask the owners of ``names``, which are live ones. Raises as ``apply``."""
        ...


@dataclass
class Edge:
    """Filled by ``app.py``. ``scheduler`` and the rest are None until the model is loaded."""

    loaded: Loaded
    stats: Ref[Any]
    tokenizer: Ref[Any] | None = None
    grammars: Ref[Any] | None = None
    scheduler: Ref[Any] | None = None
    cache: Ref[Any] | None = None
    reader: Ref[Any] | None = None
    """None as well where there is no SSD tier."""
    runner: Ref[Any] | None = None
    running_settings: RunningSettings | None = None
    codec_states: tuple[StateSpec, ...] = ()
    """What a checkpoint of the model holds; empty for models without recurrent layers."""
    model: ModelFacts = field(default_factory=ModelFacts)
    max_context: int = 0
    vocab_size: int = 0
    decode_token: Callable[[int], str] = str
    """The text of one token, for log-probabilities."""
    markup: ModelMarkup = field(default_factory=ModelMarkup)
    tool_parser: Parser | None = None
    """Reads the calls of the model; None: nobody knows their format."""
    started_at: float = 0.0
    """Unix seconds."""
    captures: Captures = field(default_factory=Captures)
    state: str = "loading"
    """loading, ready, stopping"""

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self.scheduler is not None


EDGE: web.AppKey[Edge] = web.AppKey("edge", Edge)
