"""One prompt in caches of its own, and what follows it when its recurrent states are replaced."""

from __future__ import annotations

from typing import Any, assert_never

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from omlx.cache.block_file import HostTensor
from omlx.cache.hybrid_cache import ModelCacheConfig
from omlx.core.plan import HostBlock
from omlx.core.preview import Begin, Compute, End, Export, PreviewResult, PreviewWork, Score
from omlx.engine.kv import BlockStore, fork_caches, fresh_caches, from_host, leaves, to_host

CHUNK_TOKENS = 64
"""Of the prompt, in one call: what a running stream may wait for it."""


class StatePreview:
    """Lives on the engine thread, beside the rows of requests and apart from them."""

    def __init__(self, model: nn.Module, config: ModelCacheConfig, store: BlockStore) -> None:
        """``store`` cuts and restores states; none of its blocks is touched."""
        self._model = model
        self._config = config
        self._store = store
        self._begun = Begin((), ())
        self._caches: list[Any] = []
        self._position = 0

    def run(self, work: PreviewWork) -> PreviewResult:
        """Do one part; the parts come in the order of ``core/preview.py``."""
        match work:
            case Begin():
                self._begun, self._caches, self._position = work, fresh_caches(self._model), 0
                return None
            case Compute():
                return self._compute()
            case Export():
                return self._export()
            case Score(states):
                return self._score(states)
            case End():
                self._begun, self._caches = Begin((), ()), []
                return None
        assert_never(work)

    def _compute(self) -> bool:
        stop = min(self._position + CHUNK_TOKENS, len(self._begun.prompt))
        tokens = mx.array([self._begun.prompt[self._position : stop]])  # (1, T)
        self._model(tokens, cache=self._caches)
        mx.eval([cache.state for cache in leaves(self._caches)])
        self._position = stop
        return stop < len(self._begun.prompt)

    def _export(self) -> HostBlock:
        states = self._store.cut_states(self._caches, 0)
        mx.eval(states)
        return to_host(self._config.states, states)

    def _score(self, states: HostBlock | None) -> HostTensor:
        caches = fork_caches(self._caches)
        if states is not None:
            self._store.restore_states(caches, from_host(states))
        logits = self._model(mx.array([self._begun.follow]), cache=caches)[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)  # (T, vocabulary)
        host = np.array(logprobs, dtype=np.float32)
        return HostTensor("logprobs", "float32", host.shape, host.reshape(-1).view(np.uint8).data)
