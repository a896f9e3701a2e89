"""Whether an array holds an infinity or a NaN, at the speed of memory. Pure.

By its bits: the largest signed integer among them shows a positive one, the largest unsigned one
a negative one. That is exact, writes nothing, and integers are compared many at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

INFINITY_BITS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""Of positive infinity; NaN is above it. A negative one has the sign's bit as well."""


def all_finite(values: npt.NDArray[np.float32]) -> bool:
    return all_finite_bits("float32", values.view(np.uint32))


def all_finite_bits(dtype: str, bits: npt.NDArray[np.unsignedinteger[Any]]) -> bool:
    """``bits``: values of a dtype in INFINITY_BITS, in one piece.

    With several threads each call hands the interpreter over and waits for it.
    """
    infinity, sign = INFINITY_BITS[dtype], 1 << (8 * bits.itemsize - 1)
    signed = bits.view(f"i{bits.itemsize}")
    return bool(signed.max(initial=0) < infinity and bits.max(initial=0) < infinity | sign)
