"""Runs ``python -m omlx serve ..``, which follows, with an engine whose device is lost.

The fourth pass over rows that decode fails. ``LOST`` in the environment says how often what the
engine does next, to forget its rows, fails as well.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

PATH = Path(__file__)
PASSES = 4


def lose_the_device(times: int) -> None:
    from omlx.engine.batch import DecodeBatch, Emitted
    from omlx.engine.step import Engine

    decode, forget = DecodeBatch.step, Engine.reset
    lost, passes = 0, 0

    def step(self: DecodeBatch) -> list[Emitted]:
        nonlocal passes, lost
        passes += 1
        if passes == PASSES and not lost:
            lost = times
            raise RuntimeError("the device is lost")
        return decode(self)

    def reset(self: Engine) -> None:
        nonlocal lost
        if lost > 0:
            lost -= 1
            raise RuntimeError("the device is still lost")
        forget(self)

    DecodeBatch.step, Engine.reset = step, reset


if __name__ == "__main__":
    lose_the_device(int(os.environ["LOST"]))
    _, _, _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
