"""The log as it is written: one line an event, whatever a client put into a name.

Every message is escaped as a whole, so no line of the log can be made up by what is sent to the
server, on whichever way it came into a message. Tracebacks keep their lines.
"""

from __future__ import annotations

import logging
import sys

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def printable(text: str) -> str:
    r"""``text`` with line breaks, control and format characters escaped, as in ``\n``.

    >>> printable("a\nb"), printable("Grüße")
    ('a\\nb', 'Grüße')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class OneLine(logging.Formatter):
    """Formats as usual, but the message is one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)


def set_level(level: str) -> None:
    logging.getLogger().setLevel(LEVELS[level])


def set_up_logging(level: str) -> None:
    """Log to standard error. ``level``: a value of the setting ``log_level``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=LEVELS[level], handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)
