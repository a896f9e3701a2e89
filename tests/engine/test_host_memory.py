"""What the C library is told about freed memory."""

from __future__ import annotations

import platform

import pytest

from omlx.engine.host_memory import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is no glibc here")
def test_glibc_takes_both_settings() -> None:
    assert keep_freed_memory()
