"""A line of the log begins with a time and a level that are ours, whatever is in the message."""

from __future__ import annotations

import logging

from hypothesis import given
from hypothesis import strategies as st

from omlx.logs import LEVELS, OneLine, printable
from omlx.settings import constraints


def logged(message: str, *arguments: object) -> str:
    event = logging.LogRecord("omlx", logging.INFO, __file__, 1, message, arguments, None)
    return OneLine("%(levelname)s %(message)s").format(event)


@given(st.text())
def test_any_message_is_one_printable_line(text: str) -> None:
    assert logged("client %s", text).isprintable()


@given(st.text())
def test_what_is_printable_stays_as_it_is(text: str) -> None:
    assert not text.isprintable() or printable(text) == text


def test_a_traceback_keeps_its_lines() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        event = logging.LogRecord(
            "omlx", logging.ERROR, __file__, 1, "it failed\nERROR", (), (type(error), error, None)
        )

    lines = OneLine("%(levelname)s %(message)s").format(event).splitlines()

    assert lines[0] == "ERROR it failed\\nERROR"
    assert len(lines) > 1


def test_every_level_of_the_settings_is_known() -> None:
    assert set(LEVELS) == set(constraints("log_level")["choices"])
