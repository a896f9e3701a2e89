"""Sizes as people write them: ``100GB``, ``1.5 GiB``, ``512`` (bytes), ``20%``.

    size = number [space] [unit]       units in any case; no unit means bytes
    B kB MB GB TB                      powers of 1000
    KiB MiB GiB TiB                    powers of 1024
    %                                  of a total that the setting names, 0 to 100

A percentage is a size only once its total is known, so ``resolve`` asks for the total.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

_FACTORS = {"B": 1} | {
    unit: base**power
    for base, units in ((1000, "kB MB GB TB"), (1024, "KiB MiB GiB TiB"))
    for power, unit in enumerate(units.split(), start=1)
}
_SPELLING = {unit.lower(): unit for unit in (*_FACTORS, "%")}
_GRAMMAR = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?([A-Za-z]+|%)?")
_BYTES_MAX = 2**63 - 1
_LENGTH_MAX = 64
_ADVICE = "write a number and one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, %"


@dataclass(frozen=True, slots=True)
class Size:
    """An amount of bytes, or a share of a total that is named elsewhere.

    Two sizes are equal when they mean the same: ``1GB`` equals ``1000MB``, and not ``20%``.
    """

    amount: Fraction
    """Whole bytes; percent when ``is_percent``."""
    is_percent: bool
    _text: str = field(compare=False, repr=False)

    @classmethod
    def parse(cls, value: object) -> Size:
        """Read a size from text, or from a whole number of bytes.

        Raises ValueError with a sentence that quotes no input, since the caller names it.
        """
        match value:
            case Size():
                return value
            case bool():
                raise ValueError(f"true and false are no sizes; {_ADVICE}")
            case int():
                text = str(value) if abs(value) <= _BYTES_MAX else f"{_BYTES_MAX + 1}"
            case float() if value.is_integer() and abs(value) <= _BYTES_MAX:
                text = str(int(value))
            case str():
                text = value.strip()
            case _:
                raise ValueError(f"this is no size; {_ADVICE}")
        return cls._from_text(text)

    @classmethod
    def _from_text(cls, text: str) -> Size:
        if not text:
            raise ValueError(f"a size must not be empty; {_ADVICE}")
        if text.startswith("-"):
            raise ValueError("a size must not be negative")
        match = _GRAMMAR.fullmatch(text) if len(text) <= _LENGTH_MAX else None
        if match is None:
            raise ValueError(f"this is no size; {_ADVICE}")
        digits, unit = match[1], match[2] or "B"
        if unit.lower() not in _SPELLING:
            raise ValueError(f"the unit {unit} is not known; {_ADVICE}")
        unit = _SPELLING[unit.lower()]
        number = Fraction(digits)
        text = f"{_plain(digits)}{unit}"
        if unit == "%":
            if number > 100:
                raise ValueError("a share must not exceed 100%")
            return cls(number, True, text)
        num_bytes = number * _FACTORS[unit]
        if num_bytes > _BYTES_MAX:
            raise ValueError("a size must stay below 8 EiB")
        if 0 < num_bytes < 1:
            # Rounded down it would be 0, which means "off" to most settings.
            raise ValueError("a size above 0 must be at least one byte")
        return cls(Fraction(int(num_bytes)), False, text)

    @property
    def is_zero(self) -> bool:
        return self.amount == 0

    def resolve(self, total_bytes: int) -> int:
        """The size in whole bytes, rounded down; a percentage is taken of ``total_bytes``."""
        return int(self.amount * total_bytes / 100) if self.is_percent else int(self.amount)

    def __str__(self) -> str:
        return self._text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.to_string_ser_schema(when_used="json")
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "format": "size", "examples": ["100GB", "1.5GiB", "20%"]}


def _plain(digits: str) -> str:
    """The same number without needless zeros: ``007`` is ``7``, ``1.50`` is ``1.5``."""
    whole, _, decimals = digits.partition(".")
    decimals = decimals.rstrip("0")
    return (whole.lstrip("0") or "0") + (f".{decimals}" if decimals else "")
