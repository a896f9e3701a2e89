"""What a model directory holds, in 32 hex digits: the root of every cache key."""

from __future__ import annotations

import hashlib
import logging
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_VERSION = b"omlx model fingerprint 1"
_WINDOWS = 64
_WINDOW_BYTES = 4096
_HEADER_BYTES_MAX = 100 * 1000 * 1000

# Everything that decides which tokens a prompt becomes, or what the layers compute with them.
# generation_config.json is left out: it holds defaults of sampling, which no KV depends on.
_WHOLE = (
    "config.json",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "tiktoken.model",
    "chat_template*",
    "*.py",
)


def fingerprint(path: Path) -> str:
    """Name the contents of a model directory: 32 hex digits, equal for equal contents.

    Always noticed: any change of the config, the tokenizer, the chat template, the index or model
    code beside them; of the names, sizes and modification times of weight files; of their headers
    (tensor names, types, shapes). Where all of these stay, other weights are noticed by 64 windows
    of 4 KiB spread over each file, the first and the last included: a model that was quantised or
    trained again differs in them, while a few bytes changed in a large file most likely do not.
    A touch of the weights changes the name: that costs misses, never wrong answers.

    A directory that cannot be read, or holds no weights, gets a random name used once, so that
    nothing cached can ever be taken for its own; this is logged as a warning.
    """
    try:
        return _fingerprint(path)
    except (OSError, ValueError) as error:
        log.warning("%s cannot be fingerprinted, its cache starts empty: %s", path, error)
        return secrets.token_hex(16)


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256(_VERSION)
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ValueError("no *.safetensors in it")
    for file in weights:
        for part in _weight_parts(file):
            _add(digest, part)
    small = {file for pattern in _WHOLE for file in path.glob(pattern) if file.is_file()}
    for file in sorted(small):
        _add(digest, file.name.encode())
        with file.open("rb") as stream:
            _add(digest, hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:32]


def _add(digest: hashlib._Hash, part: bytes) -> None:
    # Each part is preceded by its length, so that no two lists of parts read the same.
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)


def _weight_parts(file: Path) -> Iterator[bytes]:
    state = file.stat()
    yield file.name.encode()
    yield struct.pack("<Qq", state.st_size, state.st_mtime_ns)
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        yield start + stream.read(min(length, state.st_size, _HEADER_BYTES_MAX))
        for offset in _window_offsets(stream.tell(), state.st_size):
            stream.seek(offset)
            yield stream.read(_WINDOW_BYTES)


def _window_offsets(start: int, end: int) -> list[int]:
    """Where the windows begin between two offsets of a file; a small file is covered whole."""
    last = max(start, end - _WINDOW_BYTES)
    if last - start <= _WINDOWS * _WINDOW_BYTES:
        return [*range(start, last, _WINDOW_BYTES), last]
    return [start + (last - start) * number // (_WINDOWS - 1) for number in range(_WINDOWS)]
