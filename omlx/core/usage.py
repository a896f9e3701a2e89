"""What is counted: one record a request; totals are sums of records. Pure.

Client, log line, dashboard and metrics all read the same record, so they can't disagree.

    processed    prompt tokens of requests whose prefill ended, each request once
    cached       those of them whose computation was skipped
    efficiency   cached / processed, 0 when nothing was processed
    unfinished   prompt tokens computed for requests that ended before their prefill did
    saved        ms that a cold prefill of the cached tokens would have taken, less what looking
                 them up and restoring them took; may be negative
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from omlx.core.diagnosis import Change


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Everything that is told of a request, at its end. Durations in ms.

    ``0 <= cached_tokens < prompt_tokens``: at least one prompt token is always computed.
    """

    id: str
    time: float
    """Unix seconds of its end."""
    client: str
    route: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    cached_ram: int
    cached_ssd: int
    generated_tokens: int
    prefilled: bool
    """Its prefill ended. Only then does its prompt count as processed."""
    finish_reason: str | None
    """stop, length, cancelled; None with ``error``."""
    error: str | None
    queue_ms: float
    lookup_ms: float
    restore_ms: float
    prefill_ms: float
    decode_ms: float
    ttft_ms: float | None
    total_ms: float
    reuse_reason: str
    reuse_token: int
    attribution_stripped: bool = False
    stop: str | None = None
    """The stop string that ended the first choice. The client's words: shown to it alone."""
    unfinished_tokens: int = 0
    """Computed of the prompt of a request whose prefill did not end; 0 of one whose did."""
    engine_ms: float = 0.0
    """Of ``prefill_ms``, what the engine spent on this prompt alone."""
    saved_ms: int | None = None
    """None: no prompt was computed yet whose speed could be the measure."""
    reasoning_tokens: int = 0
    """Of those generated."""
    conversation: str = ""
    """What the client calls the conversation."""
    change: Change | None = None
    """What differs from the prompt of an earlier request."""

    @property
    def computed_tokens(self) -> int:
        """Of the prompt."""
        if not self.prefilled:
            return self.unfinished_tokens
        return self.prompt_tokens - self.cached_tokens

    @property
    def state(self) -> str:
        """completed, failed or cancelled; the names of the totals."""
        if self.error is not None:
            return "failed"
        return "cancelled" if self.finish_reason == "cancelled" else "completed"

    @property
    def tokens_per_s(self) -> float | None:
        """Of decoding; the first token is the prefill's. None: there was too little of it."""
        if self.generated_tokens < 2 or self.decode_ms <= 0:
            return None
        return round(1000 * (self.generated_tokens - 1) / self.decode_ms, 1)

    def omlx(self) -> dict[str, Any]:
        """The extension object in the final answer."""
        return {
            "queue_ms": round(self.queue_ms, 2),
            "lookup_ms": round(self.lookup_ms, 2),
            "restore_ms": round(self.restore_ms, 2),
            "prefill_ms": round(self.prefill_ms, 2),
            "decode_ms": round(self.decode_ms, 2),
            "ttft_ms": None if self.ttft_ms is None else round(self.ttft_ms, 2),
            "cached_from": {"ram": self.cached_ram, "ssd": self.cached_ssd},
            "computed_tokens": self.computed_tokens,
            "reuse_ended": {"reason": self.reuse_reason, "token": self.reuse_token},
            "changed": self.change and self.change.as_json(self.cached_tokens),
        }

    def as_json(self) -> dict[str, Any]:
        """A row of the request list."""
        return {
            "id": self.id,
            "time": self.time,
            "client": self.client,
            "route": self.route,
            "model": self.model,
            "conversation": self.conversation,
            "state": self.state,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.computed_tokens,
            "generated_tokens": self.generated_tokens,
            "ttft_ms": None if self.ttft_ms is None else round(self.ttft_ms, 2),
            "total_ms": round(self.total_ms, 2),
            "saved_ms": self.saved_ms,
            "tokens_per_s": self.tokens_per_s,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "omlx": self.omlx(),
        }


@dataclass(slots=True)
class Totals:
    """Sums of records; each field but ``saved_ms`` only grows."""

    processed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    attribution_stripped: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    unfinished_tokens: int = 0
    saved_ms: int = 0

    def add(self, record: RequestRecord) -> None:
        if record.prefilled:
            self.processed_tokens += record.prompt_tokens
            self.cached_tokens += record.cached_tokens
        self.generated_tokens += record.generated_tokens
        self.attribution_stripped += record.attribution_stripped
        self.unfinished_tokens += record.unfinished_tokens
        self.saved_ms += record.saved_ms or 0
        match record.state:
            case "failed":
                self.failed += 1
            case "cancelled":
                self.cancelled += 1
            case _:
                self.completed += 1

    def reject(self) -> None:
        """Count a request that was refused at admission: no prompt, no tokens."""
        self.rejected += 1

    def check(self) -> None:
        assert 0 <= self.cached_tokens <= self.processed_tokens, "cached is a part of processed"
        assert 0.0 <= self.efficiency <= 1.0, "a share"

    @property
    def efficiency(self) -> float:
        return self.cached_tokens / self.processed_tokens if self.processed_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "processed_tokens": self.processed_tokens,
            "cached_tokens": self.cached_tokens,
            "efficiency": self.efficiency,
            "generated_tokens": self.generated_tokens,
            "attribution_stripped": self.attribution_stripped,
            "unfinished_tokens": self.unfinished_tokens,
            "saved_ms": self.saved_ms,
            "requests": {
                "completed": self.completed,
                "failed": self.failed,
                "cancelled": self.cancelled,
                "rejected": self.rejected,
            },
        }

    def saved(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def load(cls, saved: object) -> Totals:
        """Raises ValueError when ``saved`` is not what ``saved()`` gives."""
        if not isinstance(saved, dict):
            raise ValueError("not an object")
        totals = cls()
        for known in fields(cls):
            value = saved.get(known.name, 0)
            negative_too = known.name == "saved_ms"
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{known.name} is not a whole number")
            if value < 0 and not negative_too:
                raise ValueError(f"{known.name} is not a count")
            setattr(totals, known.name, value)
        if totals.cached_tokens > totals.processed_tokens:
            raise ValueError("more cached than processed")
        return totals


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """How the engine is doing now."""

    running: int = 0
    waiting: int = 0
    last_step_age_s: float = 0.0
    prefill_tps: float = 0.0
    decode_tps: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryGauges:
    """Who has the memory now. Rows and hot tier share what weights and reserve leave."""

    total_bytes: int = 0
    weights_bytes: int = 0
    reserve_bytes: int = 0
    live_kv_bytes: int = 0
    """What the caches of the rows take now, as reckoned."""
    reserved_bytes: int = 0
    """What the rows and their computing will have taken at their end, as reckoned."""
    hot_allowed_bytes: int = 0
    """What the hot tier may have now: its limit, or less while rows need it."""
    active_bytes: int = 0
    """What MLX holds, measured after the last step."""
    peak_bytes: int = 0
    """The most that it held since the start, measured."""
    waiting: int = 0
    """Requests that wait for memory, with slots to be had."""
    preempted: int = 0
    """Rows that went back to the queue, since the start."""


@dataclass(frozen=True, slots=True)
class CacheGauges:
    """How the cache is doing now. The names are those of the public statistics."""

    hits: int = 0
    misses: int = 0
    cow_copies: int = 0
    evictions_ram: int = 0
    evictions_ssd: int = 0
    shared_blocks: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    hot_bytes: int = 0
    hot_limit_bytes: int = 0
    ssd_bytes: int = 0
    ssd_limit_bytes: int = 0
    ssd_files: int = 0
    incompatible_bytes: int = 0
    incompatible_files: int = 0
    ssd_written_bytes: int = 0
    ssd_restored_bytes: int = 0
    pending_bytes: int = 0
    pending_limit_bytes: int = 0
    pending_stops: int = 0
    corrupt_blocks: int = 0
    rejected_files: tuple[tuple[str, int], ...] = ()
    """(reason, how many files)"""
    tier_state: str = "off"

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["rejected_files"] = dict(self.rejected_files)
        values["evictions"] = self.evictions_ram + self.evictions_ssd
        return values


@dataclass(frozen=True, slots=True)
class GdnGauges:
    """How checkpoints of recurrent layers are stored, and how that goes."""

    storage: str = "ssd_sidecar"
    codec: str = "fp32"
    checkpoints: int = 0
    gdn_checkpoint_loads: int = 0
    gdn_checkpoint_walkbacks: int = 0
    gdn_decode_failures: int = 0
    pending_bytes: int = 0
    pending_limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A request that has not ended, for the dashboard."""

    id: str
    time: float
    """Unix seconds of its arrival."""
    client: str
    route: str
    model: str
    state: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    """Of the prompt, so far."""
    generated_tokens: int
    tokens_per_s: float = 0.0
    """Of its prefill, while that lasts; then of its decoding."""
    conversation: str = ""
    """What the client calls the conversation."""

    def as_json(self) -> dict[str, Any]:
        """A row of the request list, with what only an end can tell left open."""
        return {
            **asdict(self),
            "ttft_ms": None,
            "total_ms": None,
            "saved_ms": None,
            "finish_reason": None,
            "error": None,
            "omlx": None,
        }


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is served, for the dashboard."""

    id: str = ""
    kv_layers: int = 0
    rotating_layers: int = 0
    recurrent_layers: int = 0
    block_size: int = 0
    namespace: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "layers": {
                "kv": self.kv_layers,
                "rotating": self.rotating_layers,
                "recurrent": self.recurrent_layers,
            },
            "block_size": self.block_size,
            "namespace": self.namespace,
        }
