"""Which directory a model's name means, and whether it can be loaded.

A name is one of four things, asked in this order:

    demo                  the embedded demo model, under the model directory
    /a/b  ./a  ../a  ~/a  a directory, wherever it lies; only where the caller allows paths
    name  org/name        a directory under the model directory
    org/name              a Hugging Face repository, to be fetched when it is not there

Ids and repository names cannot hold ``..``, a leading dot, a backslash or a NUL, so that no name
leads out of the model directory. A symbolic link below it that the owner made is followed.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

DEMO = "demo"
DEMO_ID = "smollm2-135m-instruct"

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_ID = re.compile(rf"{_PART}(/{_PART})?")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
_HEADER_BYTES_MAX = 100 * 1000 * 1000
"""The limit of the safetensors format itself."""


class ModelUnavailable(Exception):
    """No model to load under this name; the message is one sentence saying what is missing."""


@dataclass(frozen=True, slots=True)
class Located:
    """A model that can be loaded from ``path``, at once or after a fetch.

    ``to_fetch`` says who brings it there: ``demo.pull_demo``, ``fetch.fetch``, or None when the
    directory is there and whole.
    """

    id: str
    path: Path
    to_fetch: Literal["demo", "hub"] | None = None
    repo_id: str | None = None


@dataclass(frozen=True, slots=True)
class Unusable:
    """A folder under the model directory that cannot be loaded, and why."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Listing:
    models: tuple[Located, ...]
    unusable: tuple[Unusable, ...]


def locate(name: str, model_dir: Path, *, allow_path: bool = True) -> Located:
    """Find the model that ``name`` means. Fetches and writes nothing.

    ``allow_path=False`` is for names that come from outside the command line and its settings:
    those never leave ``model_dir``. Raises ModelUnavailable.
    """
    if name == DEMO:
        path = model_dir / DEMO_ID
        return Located(DEMO_ID, path, None if what_is_missing(path) is None else "demo")
    if (allow_path and name.startswith(("/", "./", "../", "~"))) or name in (".", ".."):
        return _at_path(name, allow_path)
    if not _ID.fullmatch(name):
        raise ModelUnavailable(f"{_shown(name)} is no model name: want demo, a path or org/name")

    path = model_dir / name
    if path.is_dir() and (_looks_like_a_model(path) or "/" in name):
        return _whole(name, path)
    if "/" not in name:
        listed = [path for path in _candidates(model_dir) if path.name == name]
        if len(listed) > 1:
            ids = ", ".join(path.relative_to(model_dir).as_posix() for path in listed)
            raise ModelUnavailable(f"{name}: there are several, say which one: {ids}")
        if listed:
            return _whole(name, listed[0])
    if allow_path and Path(name, "config.json").is_file():
        return _at_path(name, allow_path)
    if "/" not in name:
        raise ModelUnavailable(
            f"{name}: no such folder in {model_dir}; to fetch one from Hugging Face, give org/name"
        )
    return Located(path.name, path, "hub", repo_id=name)


def _at_path(name: str, allow_path: bool) -> Located:
    if not allow_path or "\0" in name:
        raise ModelUnavailable(f"{_shown(name)} is no model name: want org/name")
    path = Path(name).expanduser().absolute()
    if not path.is_dir():
        raise ModelUnavailable(f"{_shown(name)}: no such directory")
    return _whole(name, path)


def _whole(name: str, path: Path) -> Located:
    missing = what_is_missing(path)
    if missing is not None:
        raise ModelUnavailable(f"{_shown(name)}: {missing}")
    return Located(path.name or path.resolve().name, path)


def _shown(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:100] + "..")[1:-1]


def list_models(model_dir: Path) -> Listing:
    """All models under ``model_dir``: folders of it, and folders of its organisation folders.

    An id is the folder's name. Where two share it, each is called by its path below ``model_dir``,
    whatever the order of the listing. Hidden folders are work in progress and are left out.
    """
    found = list(_candidates(model_dir))
    times = Counter(path.name for path in found)
    models: list[Located] = []
    unusable: list[Unusable] = []
    for path in found:
        full = path.relative_to(model_dir).as_posix()
        name = path.name if times[path.name] == 1 else full
        missing = what_is_missing(path)
        if missing is None:
            models.append(Located(name, path))
        else:
            unusable.append(Unusable(name, missing))
    return Listing(tuple(models), tuple(unusable))


def _candidates(model_dir: Path) -> Iterator[Path]:
    for path in _folders(model_dir):
        inner = [] if _looks_like_a_model(path) else _folders(path)
        yield from inner or [path]


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(p for p in path.iterdir() if not p.name.startswith(".") and p.is_dir())
    except OSError:
        return []


def _looks_like_a_model(path: Path) -> bool:
    return (path / "config.json").exists() or any(path.glob("*.safetensors"))


def what_is_missing(path: Path) -> str | None:
    """Why mlx-lm cannot load this directory, in a few words; None when nothing is missing.

    Reads the config and the header of each weight file, not the weights.
    """
    try:
        return _what_is_missing(path)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _what_is_missing(path: Path) -> str | None:
    if not path.is_dir():
        return "no such directory"
    unfinished = sorted(file.name for file in path.glob("*.incomplete"))
    if unfinished:
        return f"the download of {unfinished[0].removesuffix('.incomplete')} is not finished"
    if not (path / "config.json").is_file():
        return "no config.json"
    if "model_type" not in _read_object(path / "config.json"):
        return "config.json is damaged, or names no model_type"
    weights = sorted(path.glob("model*.safetensors"))
    absent = _missing_shards(path, {file.name for file in weights})
    if absent:
        return f"{len(absent)} weight file(s) missing, the first is {absent[0]}"
    if not weights:
        return "no weights (model*.safetensors)"
    for file in weights:
        fault = _damage(file)
        if fault is not None:
            return f"{file.name} {fault}"
    if not any((path / name).is_file() for name in _TOKENIZERS):
        return f"no tokenizer ({', '.join(_TOKENIZERS)})"
    return None


def _missing_shards(path: Path, present: set[str]) -> list[str]:
    """What the index names, or, without one, what the shards' own numbers promise."""
    wanted: set[str] = set()
    index = path / "model.safetensors.index.json"
    if index.is_file():
        places = _read_object(index).get("weight_map")
        if isinstance(places, dict):
            wanted = {str(file) for file in cast(dict[str, object], places).values()}
    for name in present if not wanted else ():
        shard = _SHARD.fullmatch(name)
        if shard is not None:
            stem, count = shard["stem"], shard["count"]
            wanted |= {
                f"{stem}-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)
            }
    return sorted(wanted - present)


def _damage(file: Path) -> str | None:
    """Compare a safetensors file's size with what its header promises."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _HEADER_BYTES_MAX):
            return "is cut off or is no safetensors file"
        header = _parse_object(stream.read(length))
    header.pop("__metadata__", None)
    if not header:
        return "holds no tensors"
    try:
        ends = [int(cast(Any, entry)["data_offsets"][1]) for entry in header.values()]
    except (IndexError, KeyError, TypeError, ValueError):
        return "has a damaged header"
    promised = 8 + length + max(ends)
    return None if size == promised else f"has {size} bytes, its header promises {promised}"


def _read_object(file: Path) -> dict[str, object]:
    return _parse_object(file.read_bytes())


def _parse_object(data: bytes) -> dict[str, object]:
    """The JSON object in ``data``; an empty one when it is anything else."""
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return cast(dict[str, object], value) if isinstance(value, dict) else {}
