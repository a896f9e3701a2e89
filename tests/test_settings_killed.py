"""A server that is killed while it saves its settings leaves the old ones or the new ones."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from omlx.settings import load_settings, save_settings_file

KEY = "sk-killed-0123456789"
SAVE = """
import os, signal, sys
from pathlib import Path
from omlx.settings import save_settings_file

name, when, number = sys.argv[2], sys.argv[3], int(sys.argv[4])
calls, real = 0, getattr(os, name)

def dying(*args):
    global calls
    calls += 1
    if calls == number and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = real(*args)
    if calls == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(os, name, dying)
save_settings_file(Path(sys.argv[1]), {"port": 2})
"""


@pytest.mark.parametrize(
    ("call", "when", "number", "port"),
    [
        ("fsync", "before", 1, 1),
        ("fsync", "after", 1, 1),
        ("replace", "before", 1, 1),
        ("replace", "after", 1, 2),
        ("fsync", "before", 2, 2),
    ],
)
def test_a_kill_in_the_middle_of_a_save_leaves_a_whole_file_and_the_key(
    tmp_path: Path, call: str, when: str, number: int, port: int
) -> None:
    """B37 d: at each step of it; the next start is neither refused nor open."""
    save_settings_file(tmp_path, {"port": 1, "api_key": KEY})

    killed = subprocess.run(
        [sys.executable, "-c", SAVE, str(tmp_path), call, when, str(number)], check=False
    )

    assert killed.returncode == -signal.SIGKILL, "it came there"
    loaded = load_settings({}, {}, tmp_path)
    assert loaded.settings.port == port
    assert loaded.settings.api_key is not None
    assert loaded.settings.api_key.get_secret_value() == KEY
    assert not list(tmp_path.glob("*.corrupt-*"))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}, "a copy that is left holds the key as well"
    save_settings_file(tmp_path, {"port": 3})
    assert load_settings({}, {}, tmp_path).settings.port == 3
