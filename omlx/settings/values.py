"""How each kind of value is read: one reader per kind, whatever the source.

A reader takes what a flag, a variable or the settings file holds, text or JSON, and raises
ValueError with the cause alone: whoever knows the setting's name and source makes the sentence.
A cause never quotes a key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    WithJsonSchema,
)

from omlx.sizes import Size


@dataclass(frozen=True, slots=True)
class Hint:
    """How a value of this kind is written, for help and for error messages."""

    metavar: str
    text: str


def _switch(value: object) -> bool:
    word = str(value).strip().lower()
    if word in {"true", "1", "yes", "on"}:
        return True
    if word in {"false", "0", "no", "off"}:
        return False
    raise ValueError("this is neither true nor false")


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


def _word(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("this is no text")
    if not value.strip():
        raise ValueError("it must not be empty")
    if not value.strip().isprintable():
        raise ValueError("it must hold printable characters only")
    return value.strip()


def _host(value: object) -> str:
    return _text(value).removeprefix("[").removesuffix("]")


def _items(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError("this is no list of names")
    return tuple(part.strip() for part in parts if part.strip())


def _host_names(value: object) -> tuple[str, ...]:
    # The port of a Host header is ignored, so one given here is ignored as well.
    names = [re.sub(r"^(\[.*\]|[^:]+):\d+$", r"\1", name.lower()) for name in _items(value)]
    if any(re.search(r"[/*\s]", name) for name in names):
        raise ValueError("a host is a plain name, without scheme, path or wildcard")
    return tuple(names)


def _origins(value: object) -> tuple[str, ...]:
    origins = [origin.lower().rstrip("/") for origin in _items(value)]
    if not all(re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s*]+", origin) for origin in origins):
        raise ValueError("an origin is scheme://host[:port], without a path, or *")
    return tuple(origins)


def _pairs(value: object) -> dict[str, str]:
    if isinstance(value, Mapping):
        pairs = [(str(alias), str(target)) for alias, target in value.items()]
    else:
        split = [item.partition("=") for item in _items(value)]
        pairs = [(alias, target) for alias, _, target in split]
    aliases = {alias.strip(): target.strip() for alias, target in pairs}
    if not all(alias and target for alias, target in aliases.items()):
        raise ValueError("each alias needs a name and a model, alias=model")
    if len(aliases) < len(pairs):
        raise ValueError("an alias is given twice")
    return aliases


def read_folder(value: object) -> Path:
    path = value if isinstance(value, Path) else Path(_text(value))
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise ValueError("there is no home directory to stand for ~") from None


def _key(value: object) -> SecretStr | None:
    if value is None:
        return None
    key = value.get_secret_value() if isinstance(value, SecretStr) else value
    # The checks of _text would do, but none of them may ever quote the key.
    if not isinstance(key, str) or not key.strip():
        raise ValueError("a key must be text of at least one character")
    if not re.fullmatch(r"[!-~]+", key.strip()):
        raise ValueError("a key may hold printable ASCII characters only, and no spaces")
    return SecretStr(key.strip())


def _size_or_auto(value: object) -> Size | Literal["auto"]:
    return "auto" if _word(value) == "auto" else Size.parse(value)


def _positive(size: Size) -> Size:
    if size.is_zero:
        raise ValueError("it must be more than 0")
    return size


def _absolute(size: Size) -> Size:
    if size.is_percent:
        raise ValueError("it is an amount of bytes, not a share")
    return size


def power_of_two(number: int) -> int:
    if number & (number - 1):
        raise ValueError("it must be a power of two")
    return number


# ── the kinds ────────────────────────────────────────────────────────────────────────────────

_SIZES = "such as 512MB, 1.5GiB or 20%"
Switch = Annotated[bool, BeforeValidator(_switch), Hint("", "true or false")]
Whole = Annotated[int, BeforeValidator(_number), Hint("N", "a whole number")]
WholeOrNone = Annotated[int | None, BeforeValidator(_number), Hint("N", "a whole number")]
Decimals = Annotated[
    float, BeforeValidator(_number), Field(allow_inf_nan=False), Hint("X", "a number")
]
Host = Annotated[str, BeforeValidator(_host), Hint("HOST", "an address or a host name")]
ModelName = Annotated[
    str, BeforeValidator(_text), Hint("MODEL", "a folder, a Hugging Face id, or demo")
]
HostNames = Annotated[
    tuple[str, ...], BeforeValidator(_host_names), Hint("A,B", "host names, comma separated")
]
Origins = Annotated[
    tuple[str, ...],
    BeforeValidator(_origins),
    Hint("A,B", "origins such as https://chat.example, comma separated"),
]
Pairs = Annotated[
    dict[str, str], BeforeValidator(_pairs), Hint("A=B,C=D", "alias=model pairs, comma separated")
]
Folder = Annotated[Path, BeforeValidator(read_folder), Hint("DIR", "a folder")]
Key = Annotated[
    SecretStr | None, BeforeValidator(_key), Hint("KEY", "printable ASCII without spaces")
]
AnySize = Annotated[Size, Hint("SIZE", f"a size {_SIZES}")]
PositiveSize = Annotated[Size, AfterValidator(_positive), Hint("SIZE", f"a size above 0 {_SIZES}")]
ByteCount = Annotated[
    Size,
    AfterValidator(_absolute),
    AfterValidator(_positive),
    Hint("SIZE", "a size above 0 such as 64MB or 1GiB"),
]
SizeOrAuto = Annotated[
    Size | Literal["auto"],
    PlainValidator(_size_or_auto),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "size", "examples": ["auto", "512MB"]}),
    Hint("SIZE", f"auto, or a size {_SIZES}"),
]
WritePolicy = Annotated[Literal["behind", "selective", "through"], BeforeValidator(_word)]
GdnStorage = Annotated[Literal["auto", "ssd_sidecar", "embedded"], BeforeValidator(_word)]
GdnCodec = Annotated[
    Literal["fp32", "bf16", "int8", "rht_int8", "rht_int16"], BeforeValidator(_word)
]
ReasoningField = Annotated[
    Literal["reasoning_content", "reasoning", "both"], BeforeValidator(_word)
]
LogLevel = Annotated[Literal["trace", "debug", "info", "warning", "error"], BeforeValidator(_word)]
