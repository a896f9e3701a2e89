"""What each codec of recurrent states costs and what it changes, on a model's own states.

    python scripts/report_codecs.py --model FOLDER [--prompts 50] [--json FILE] [--text FILE ...]

Each prompt is a piece of the text; at four places in it the state is taken and continued with
``--tokens`` tokens, greedily. Those tokens are then fed once more behind the state that went
through each codec, and the next-token distributions are compared, position by position.

    bytes        of a checkpoint: encoded recurrent states, and convolution tails as they are
    error        relative L2 of a state, mean and worst over layers and places
    KL           of the distributions after the codec from those before, nats, mean and worst
    same next    positions whose likeliest token is the same
    same answer  continuations whose tokens are all the same

Speeds are float32 bytes a second, in one thread, medians. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from omlx import blas
from omlx.cache import codecs
from omlx.cache.checkpoint_file import encoded_nbytes
from omlx.engine.kv import BlockArrays, BlockStore, fork_caches, fresh_caches, leaves
from omlx.engine.load import LoadedModel, load

PLACES = 4
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class Found:
    """About one codec."""

    errors: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)


class Report:
    def __init__(self, model: LoadedModel, num_tokens: int) -> None:
        self._model, self._config = model.model, model.cache
        self._store = BlockStore(model.cache, host_copies=True)
        self._num_tokens = num_tokens
        self.found = {codec: Found() for codec in codecs.CODECS}

    def add(self, prompt: list[int], places: int) -> None:
        """Continue a prompt from several places in it, through each codec."""
        caches, position = fresh_caches(self._model), 0
        for number in range(1, places + 1):
            stop = len(prompt) * number // places
            logits = self._feed(caches, prompt[position:stop])
            position = stop
            self._compare(caches, int(np.argmax(logits[-1])))

    def _compare(self, caches: list[Any], first: int) -> None:
        state = self._store.cut_states(caches, 0)
        mx.eval(state)
        answer = self._continue(fork_caches(caches), first)
        exact = weights = None
        for codec, found in self.found.items():
            forked = fork_caches(caches)
            self._store.restore_states(forked, self._through(codec, found, state))
            logs = _log_softmax(self._feed(forked, answer))
            if exact is None or weights is None:
                exact, weights = logs, np.exp(logs)
            kl = (weights * (exact - logs)).sum(axis=1, dtype=np.float64)
            same = exact.argmax(axis=1) == logs.argmax(axis=1)
            found.divergences += [max(0.0, float(value)) for value in kl]
            found.same += [bool(value) for value in same]
            found.answers.append(bool(same.all()))

    def _continue(self, caches: list[Any], token: int) -> list[int]:
        answer = [token]
        while len(answer) < self._num_tokens:
            answer.append(int(np.argmax(self._feed(caches, answer[-1:])[-1])))
        return answer

    def _feed(self, caches: list[Any], tokens: list[int]) -> np.ndarray:
        logits = self._model(mx.array([tokens]), cache=caches)[0]  # (T, vocabulary)
        mx.eval(logits, [cache.state for cache in leaves(caches)])
        return np.array(logits.astype(mx.float32))

    def _through(self, codec: str, found: Found, state: BlockArrays) -> BlockArrays:
        decoded: list[mx.array] = []
        encode_s = decode_s = 0.0
        for spec, array in zip(self._config.states, state, strict=True):
            if not spec.is_recurrent:
                decoded.append(array)
                continue
            before = np.array(array)
            started = time.perf_counter()
            encoded = codecs.encode(codec, spec.name, before)
            between = time.perf_counter()
            after = codecs.decode(spec.name, encoded.metadata, encoded.tensors)
            decode_s += time.perf_counter() - between
            encode_s += between - started
            found.errors.append(float(np.linalg.norm(after - before) / np.linalg.norm(before)))
            decoded.append(mx.array(after))
        found.encode_s.append(encode_s)
        found.decode_s.append(decode_s)
        return tuple(decoded)

    def rows(self) -> Iterator[dict[str, Any]]:
        states = self._config.states
        raw_mb = sum(state.nbytes for state in states if state.is_recurrent) / 1e6
        for codec, found in self.found.items():
            nbytes = encoded_nbytes(codec, states)
            yield {
                "codec": codec,
                "bytes": nbytes,
                "share": nbytes / self._config.checkpoint_bytes,
                "encode_mb_s": raw_mb / statistics.median(found.encode_s),
                "decode_mb_s": raw_mb / statistics.median(found.decode_s),
                "error_mean": statistics.mean(found.errors),
                "error_worst": max(found.errors),
                "kl_mean": statistics.mean(found.divergences),
                "kl_worst": max(found.divergences),
                "same_next": statistics.mean(found.same),
                "same_answer": statistics.mean(found.answers),
                "continuations": len(found.answers),
            }


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))


def pieces(tokens: list[int], count: int, length: int) -> Iterator[list[int]]:
    """``count`` pieces, evenly spread; they overlap when the text is short."""
    assert len(tokens) > length, "the text is shorter than a prompt"
    for number in range(count):
        start = (len(tokens) - length) * number // max(1, count - 1)
        yield tokens[start : start + length]


HEAD = (
    "| codec | bytes | of fp32 | encode MB/s | decode MB/s | error, mean | error, worst "
    "| KL, mean | KL, worst | same next | same answer |"
)


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [HEAD, "|---" * HEAD.count(" |") + "|"]
    for row in rows:
        lines.append(
            f"| {row['codec']} | {row['bytes']:,} | {row['share']:.3f} "
            f"| {row['encode_mb_s']:.0f} | {row['decode_mb_s']:.0f} "
            f"| {row['error_mean']:.1e} | {row['error_worst']:.1e} "
            f"| {row['kl_mean']:.1e} | {row['kl_worst']:.1e} "
            f"| {100 * row['same_next']:.2f} % | {100 * row['same_answer']:.1f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    blas.preload_fast_blas()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="*", help="by default this repository's prose")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--length", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a continuation")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = load(arguments.model, 1 << 40)
    assert model.cache.is_recurrent, "a model without recurrent layers has no states to encode"
    texts = arguments.text or sorted(REPOSITORY.glob("*.md"))
    tokens = list(model.tokenizer.encode("\n\n".join(path.read_text() for path in texts)))
    report = Report(model, arguments.tokens)
    for prompt in pieces(tokens, arguments.prompts, arguments.length):
        report.add(prompt, PLACES)
    rows = list(report.rows())
    print(markdown(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
