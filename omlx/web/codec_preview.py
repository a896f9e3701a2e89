"""What each codec would cost and save, on a recurrent state of the model that is served.

A fixed text is computed as far as a checkpoint would be, its recurrent states go through each
codec, and the model continues from what comes out: how far its predictions are from those of the
exact states is what a codec costs. The engine does it in short calls, between steps of requests;
codecs run in a thread of their own, as when files are written.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omlx.actors.messages import RunPreview, Tokenize
from omlx.cache import codecs
from omlx.cache.block_file import HostTensor
from omlx.core.plan import HostBlock
from omlx.core.preview import Begin, Compute, End, Export, PreviewResult, PreviewWork, Score
from omlx.kernel.message import MailboxFull
from omlx.web.edge import Edge

FOLLOW_TOKENS = 32
"""Predictions that are compared."""

PROMPT_TOKENS = 512
BUSY_S = 0.05

TEXT = """\
Notes on keeping bees through the winter. A colony does not sleep. From late autumn the bees form \
a ball around the queen, and those inside warm it by shivering their flight muscles while those \
outside hold still and insulate. They change places the whole winter long. The ball moves slowly \
over the combs, eating its way through the honey that was stored in summer, and a hive that starts \
with less than fifteen kilograms will rarely see the willows bloom. Cold alone seldom kills a \
colony. Damp does: warm air rises from the ball, meets the cold lid and rains back on the bees. So \
a good hive has a dry lid and a small opening at the top, and the keeper tilts the whole box a \
little to the front. In January there is nothing to do but listen. A steady low hum is well; a \
loud, uneven roar means that the queen is gone. On the first warm day of February the bees fly out \
to clean themselves, and the snow before the hive turns yellow. Then the queen begins to lay \
again, a patch no larger than a coin, and the ball must be kept at thirty-five degrees instead of \
twenty-five. This is when most colonies starve: the stores are low, the brood is hungry, and a \
week of frost keeps the bees from crossing to the next comb, which may be full. The keeper who \
hears this in time lays a slab of sugar right above the ball. The keeper who does not will find, \
in March, a ball of dead bees, heads deep in empty cells, a hand's width from ten kilograms of \
honey. In spring the first pollen comes from hazel, alder and willow, and the colony doubles every \
three weeks until the middle of June. Before that the keeper has given it room, for a colony that \
feels crowded raises new queens and leaves with the old one. Whoever counts the combs of brood on \
the first of May can tell the harvest to within a few kilograms, and whoever forgets to count will \
stand under an apple tree with a ladder and an empty box.
"""


class NoStates(Exception):
    """The model keeps no recurrent states: no codec is ever used."""


class TooShort(Exception):
    """The model's context has no room for the text."""


@dataclass(frozen=True, slots=True)
class CodecTrial:
    """One codec. Errors are of all recurrent states together."""

    codec: str
    bytes: int
    """Of a checkpoint's tensors in a file."""
    ratio: float
    """Of those bytes to the exact ones."""
    rel_error: float
    """L2 of the error, by the L2 of the states."""
    max_error: float
    rms_error: float
    kl: float
    """Nats; of the next token's distribution, mean over the compared predictions."""
    kl_max: float
    agree: float
    """Share of the predictions whose likeliest token is the same."""
    encode_ms: float
    decode_ms: float


async def preview(edge: Edge) -> dict[str, Any]:
    """A row for each codec. Raises NoStates, TooShort, Rejected and ActorGone."""
    specs = edge.codec_states
    if not any(spec.is_recurrent for spec in specs):
        raise NoStates
    assert edge.tokenizer is not None, "the server is ready"
    text = await edge.tokenizer.ask(Tokenize(TEXT, add_special=True, parse_special=False))
    tokens = text[: min(PROMPT_TOKENS + FOLLOW_TOKENS, edge.max_context)]
    prompt, follow = tokens[:-FOLLOW_TOKENS], tokens[-FOLLOW_TOKENS:]
    if not prompt:
        raise TooShort
    try:
        await _run(edge, Begin(prompt, follow))
        while await _run(edge, Compute()):
            pass
        states = await _run(edge, Export())
        assert isinstance(states, tuple), "an export is a block"
        exact = _array(await _run(edge, Score(None)))
        recurrent = frozenset(spec.name for spec in specs if spec.is_recurrent)
        rows: list[CodecTrial] = []
        for codec in codecs.CODECS:
            stored, through, times = await asyncio.to_thread(_through, codec, states, recurrent)
            scores = _array(await _run(edge, Score(through)))
            rows.append(
                await asyncio.to_thread(
                    _trial, codec, (states, through, recurrent), stored, times, (exact, scores)
                )
            )
    finally:
        assert edge.runner is not None, "the server is ready"
        edge.runner.offer(RunPreview(End()))
    return {
        "rows": [asdict(row) for row in rows],
        "prompt_tokens": len(prompt),
        "compared_tokens": len(follow),
        "states": len(recurrent),
        "model": edge.model.id,
    }


async def _run(edge: Edge, work: PreviewWork) -> PreviewResult:
    """Steps of requests come first: where their mailbox is full, this waits."""
    assert edge.runner is not None, "the server is ready"
    while True:
        try:
            return await edge.runner.ask(RunPreview(work))
        except MailboxFull:
            await asyncio.sleep(BUSY_S)


def _array(scores: PreviewResult) -> npt.NDArray[np.float32]:
    assert isinstance(scores, HostTensor), "a score is a tensor"
    return np.frombuffer(scores.data, np.float32).reshape(scores.shape)


def _through(
    codec: str, states: HostBlock, recurrent: frozenset[str]
) -> tuple[int, HostBlock, tuple[float, float]]:
    """(bytes in a file, the states as they come out of it, (encode, decode) in ms)"""
    nbytes, encode_s, decode_s = 0, 0.0, 0.0
    out: list[HostTensor] = []
    arrays = [(t, np.frombuffer(t.data, np.float32)) for t in states if t.name in recurrent]
    _once(codec, arrays[0][0].shape)  # signs and plans are made at the first use, and kept
    for tensor in states:
        if tensor.name not in recurrent:
            nbytes += tensor.nbytes
            out.append(tensor)
            continue
        state = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
        began = time.perf_counter()
        encoded = codecs.encode(codec, tensor.name, state)
        between = time.perf_counter()
        decoded = codecs.decode(tensor.name, encoded.metadata, encoded.tensors)
        encode_s, decode_s = (
            encode_s + between - began,
            decode_s + time.perf_counter() - between,
        )
        nbytes += sum(part.nbytes for part in encoded.tensors)
        data = np.ascontiguousarray(decoded).reshape(-1).view(np.uint8).data
        out.append(HostTensor(tensor.name, tensor.dtype, tensor.shape, data))
    return nbytes, tuple(out), (1000 * encode_s, 1000 * decode_s)


def _once(codec: str, shape: tuple[int, ...]) -> None:
    encoded = codecs.encode(codec, "warm", np.zeros(shape, np.float32))
    codecs.decode("warm", encoded.metadata, encoded.tensors)


def _trial(
    codec: str,
    pair: tuple[HostBlock, HostBlock, frozenset[str]],
    stored: int,
    times: tuple[float, float],
    scores: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]],
) -> CodecTrial:
    before, after, recurrent = pair
    error2 = total2 = largest = 0.0
    count = 0
    for left, right in zip(before, after, strict=True):
        if left.name in recurrent:
            exact = np.frombuffer(left.data, np.float32)
            error = (np.frombuffer(right.data, np.float32) - exact).astype(np.float64)
            error2 += float(error @ error)
            total2 += float(np.square(exact, dtype=np.float64).sum())
            largest = max(largest, float(np.abs(error).max()))
            count += error.size
    kl = divergence(*scores)
    same = scores[0].argmax(-1) == scores[1].argmax(-1)
    return CodecTrial(
        codec,
        stored,
        stored / sum(tensor.nbytes for tensor in before),
        (error2 / total2) ** 0.5 if total2 else 0.0,
        largest,
        (error2 / count) ** 0.5,
        float(kl.mean()),
        float(kl.max()),
        float(same.mean()),
        *(round(ms, 3) for ms in times),
    )


def divergence(
    exact: npt.NDArray[np.float32], other: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """KL(exact || other) of each row of log-probabilities, in nats; rounding never makes it < 0."""
    left = exact.astype(np.float64)
    found = (np.exp(left) * (left - other)).sum(-1)
    return np.maximum(found, 0.0)
