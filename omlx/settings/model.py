"""The settings: names, kinds, defaults, limits, and when a change of each takes effect.

``Settings`` is the one definition. Flags, environment variables, the settings file, the help,
the README's table and the admin page are all derived from its fields.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, Field, SecretStr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from omlx.settings.values import (
    AnySize,
    ByteCount,
    Decimals,
    Folder,
    GdnCodec,
    GdnStorage,
    Hint,
    Host,
    HostNames,
    Key,
    LogLevel,
    ModelName,
    Origins,
    Pairs,
    PositiveSize,
    ReasoningField,
    SizeOrAuto,
    Switch,
    Whole,
    WholeOrNone,
    WritePolicy,
    power_of_two,
)

ENV_PREFIX = "OMLX_"

Apply = Literal["live", "next_request", "reload", "restart"]
"""When a change that was saved is in force: at once; for requests and files that begin after it;
when a model is loaded, and when the server starts."""

# Beyond these a number is a slip of the finger, and 32-bit positions would overflow.
_TOKENS_MAX = 2**24
_BLOCKS_MAX = 2**24


def _setting(
    default: object,
    apply: Apply,
    description: str,
    *,
    unit: str = "",
    shown: str | None = None,
    **bounds: Any,
) -> Any:
    """Define a field. ``shown`` is its default in words, where the value alone says too little."""
    extra: dict[str, Any] = {"apply": apply, "unit": unit}
    if shown is not None:
        extra["shown"] = shown
    return Field(default, description=description, json_schema_extra=extra, **bounds)


class Settings(BaseSettings):
    """What the server is told, checked one by one. ``Settings()`` is the defaults, always.

    ``load_settings`` reads the sources and makes the checks that concern several values.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # The library's own environment source passes over unknown names in silence and cannot
        # say where a value came from, so load_settings does that part.
        return (init_settings,)

    host: Host = _setting(
        "127.0.0.1",
        "restart",
        "Address to listen on. Any but a loopback address is refused without `api_key`.",
    )
    port: Whole = _setting(
        8000, "restart", "Port to listen on. 0 takes any free one.", ge=0, le=65535
    )
    allowed_hosts: HostNames = _setting(
        (),
        "live",
        "Host names that requests may use, besides the loopback names and `host`.",
        shown="loopback names",
    )
    cors_origins: Origins = _setting(
        (), "live", "Web origins that may call the API from a browser. Unset: no CORS headers."
    )
    api_key: Key = _setting(
        None,
        "live",
        "Key that clients must send. Unset: everything is open, on a loopback address only.",
    )
    admin_key: Key = _setting(
        None, "live", "Key that alone opens /admin. Unset: `api_key` opens it as well."
    )
    model: ModelName = _setting(
        "demo",
        "reload",
        "Model to serve: a folder, a Hugging Face id, or `demo`, the embedded one. "
        "Its id is the last part of the path.",
    )
    model_dir: Folder = _setting(
        Path("~/.omlx/models"),
        "reload",
        "Folder that fetched models are kept in.",
        shown="$OMLX_HOME/models",
    )
    model_aliases: Pairs = _setting(
        {}, "live", "Other names for models, `alias=model,alias=model`."
    )
    memory_budget: PositiveSize = _setting(
        "90%",
        "reload",
        "Memory for weights, live KV, hot tier and reserve together. % of the device's working "
        "set (Metal, CUDA), on CPU of the RAM or the cgroup's limit if that is smaller.",
        unit="bytes",
    )
    cache_enabled: Switch = _setting(
        True,
        "reload",
        "Keep KV for reuse. Off: no tier; prefill is cut at the same places all the same.",
    )
    hot_cache_max_size: AnySize = _setting(
        "20%", "live", "Cache in RAM. % of `memory_budget`. 0 turns this tier off.", unit="bytes"
    )
    ssd_cache_dir: Folder = _setting(
        Path("~/.omlx/cache"),
        "restart",
        "Folder of the cache on SSD. `/` and a home directory are refused.",
        shown="$OMLX_HOME/cache",
    )
    ssd_cache_max_size: AnySize = _setting(
        "100GB",
        "live",
        "Cache on SSD. % of the volume. 0 turns this tier off.",
        unit="bytes",
        shown="100GB, at most 10% of the volume unless set",
    )
    ssd_free_space_floor: AnySize = _setting(
        "5%",
        "live",
        "Free space at which writing to the SSD stops; nothing is deleted, reads go on. "
        "% of the volume. 0: no floor.",
        unit="bytes",
    )
    ssd_write_policy: WritePolicy = _setting(
        "behind",
        "live",
        "What goes to the SSD, and when: `behind` the answer, `selective` (only what was asked "
        "for twice), `through` (a request ends when its blocks are written).",
    )
    ssd_pending_max_size: SizeOrAuto = _setting(
        "auto",
        "live",
        "KV blocks that may wait to be written. % of RAM; `auto` is 2 %, at least 8 blocks. "
        "0: none waits.",
        unit="bytes",
    )
    paged_cache_block_size: Annotated[Whole, AfterValidator(power_of_two)] = _setting(
        256,
        "reload",
        "Tokens in a KV block, a power of two. Smaller blocks share more and cost more hashing.",
        unit="tokens",
        ge=16,
        le=4096,
    )
    initial_cache_blocks: Whole = _setting(
        256,
        "reload",
        "Blocks that the pool begins with; it grows by 256.",
        unit="blocks",
        ge=1,
        le=_BLOCKS_MAX,
    )
    max_cache_blocks: WholeOrNone = _setting(
        None,
        "reload",
        "Blocks that the pool may grow to. Unset: what `memory_budget` allows.",
        unit="blocks",
        shown="derived",
        ge=1,
        le=_BLOCKS_MAX,
    )
    gdn_snapshot_storage: GdnStorage = _setting(
        "auto",
        "next_request",
        "Where checkpoints of recurrent layers are stored: beside the blocks (`ssd_sidecar`) or "
        "in them (`embedded`). `auto`: ssd_sidecar when the SSD tier is on.",
    )
    gdn_ssd_pending_max_size: AnySize = _setting(
        "512MB",
        "live",
        "Checkpoints that may wait to be written. % of RAM. 0: none waits.",
        unit="bytes",
    )
    gdn_sidecar_state_dtype: GdnCodec = _setting(
        "fp32", "next_request", "Codec of stored checkpoints. Smaller ones lose precision."
    )
    gdn_checkpoint_interval: Whole = _setting(
        2048,
        "reload",
        "Tokens between two checkpoints of recurrent layers.",
        unit="tokens",
        ge=16,
        le=65536,
    )
    max_concurrent_requests: Whole = _setting(
        8, "live", "Requests that are computed at once.", unit="requests", ge=1, le=1024
    )
    max_queued_requests: Whole = _setting(
        64,
        "live",
        "Requests that may wait; beyond it: 429 with Retry-After.",
        unit="requests",
        ge=1,
        le=65536,
    )
    prefill_step_tokens: Whole = _setting(
        2048,
        "next_request",
        "Most prompt tokens computed in one step.",
        unit="tokens",
        ge=1,
        le=_TOKENS_MAX,
    )
    decode_share: Decimals = _setting(
        0.5,
        "live",
        "Share of time that running streams keep while another request's prompt is computed. "
        "0: none.",
        ge=0,
        lt=1,
    )
    default_max_tokens: Whole = _setting(
        4096,
        "next_request",
        "Tokens to generate when a request names no limit.",
        unit="tokens",
        ge=1,
        le=_TOKENS_MAX,
    )
    max_context: WholeOrNone = _setting(
        None,
        "next_request",
        "Longest prompt and answer together. A longer prompt is refused, an answer is cut.",
        unit="tokens",
        shown="the model's",
        ge=1,
        le=_TOKENS_MAX,
    )
    body_max_size: ByteCount = _setting(
        "64MB", "restart", "Longest request body; beyond it: 413.", unit="bytes"
    )
    max_connections: Whole = _setting(
        512, "restart", "Open connections; beyond it: 503.", unit="connections", ge=1, le=65536
    )
    drain_timeout_s: Decimals = _setting(
        30.0,
        "live",
        "How long a stopping server lets running requests finish. 0: not at all.",
        unit="seconds",
        ge=0,
        le=86400,
    )
    strip_attribution: Switch = _setting(
        True,
        "next_request",
        "Leave out a leading system block or line that holds nothing but "
        "`x-anthropic-billing-header:` data, which differs in every request.",
    )
    strict_requests: Switch = _setting(
        False,
        "next_request",
        "Refuse a request with a field that means nothing here, with 400 and its name, instead of "
        "naming it in `x-omlx-ignored`. For tests of clients.",
    )
    reasoning_field: ReasoningField = _setting(
        "reasoning_content",
        "next_request",
        "What a chat completion calls the model's thoughts: `reasoning_content`, `reasoning` or "
        "`both`. Other APIs have one name for them.",
    )
    metrics_vllm_names: Switch = _setting(
        False,
        "live",
        "Add vLLM's names (`vllm:...`) of the same numbers to /metrics.",
    )
    log_level: LogLevel = _setting(
        "info", "live", "Least important messages logged. Prompts only appear in `trace`."
    )


NAMES: tuple[str, ...] = tuple(Settings.model_fields)
SECRETS = frozenset(
    name for name, info in Settings.model_fields.items() if SecretStr in get_args(info.annotation)
)


def apply_class(name: str) -> Apply:
    extra = Settings.model_fields[name].json_schema_extra
    assert isinstance(extra, dict), "every field is made by _setting"
    return cast(Apply, extra["apply"])


LIVE: tuple[str, ...] = tuple(
    name for name in NAMES if apply_class(name) in ("live", "next_request")
)
"""What a running server can take over."""


def env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def constraints(name: str) -> dict[str, Any]:
    """What the setting accepts: ``text`` for people, and ``min max below choices`` where set."""
    info = Settings.model_fields[name]
    found: dict[str, Any] = {}
    for rule in info.metadata:
        for bound, key in (("ge", "min"), ("le", "max"), ("lt", "below")):
            if getattr(rule, bound, None) is not None:
                found[key] = getattr(rule, bound)
    text = next((rule.text for rule in info.metadata if isinstance(rule, Hint)), None)
    if text is None:
        found["choices"] = list(get_args(info.annotation))
        text = "one of " + ", ".join(found["choices"])
    if power_of_two in [getattr(rule, "func", None) for rule in info.metadata]:
        text = "a power of two"
    if "max" in found:
        text += f" from {found['min']} to {found['max']}"
    elif "below" in found:
        text += f" from {found['min']} to below {found['below']}"
    return {"text": text, **found}
