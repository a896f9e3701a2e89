"""How the tools talk: exit codes, refusals, a question to whoever sits there."""

from __future__ import annotations

import argparse
import sys

FOUND_BAD, BAD_USAGE, LOCKED = 1, 2, 4


class Refused(Exception):
    """It can't be done. The text is one clear line; ``code`` the exit code."""

    def __init__(self, message: str, code: int = BAD_USAGE) -> None:
        super().__init__(message)
        self.code = code


def agreed(arguments: argparse.Namespace, question: str) -> bool:
    """Whether to go on. Nobody is asked where nobody sits."""
    if arguments.yes or not sys.stdin.isatty():
        return True
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("nothing was removed", file=sys.stderr)
    return False
