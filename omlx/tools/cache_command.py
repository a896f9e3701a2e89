"""``omlx cache stats | verify | ls | clear``: arguments in, words or JSON and an exit code out.

Each works on a directory, or with ``--url`` through a running server.
"""

from __future__ import annotations

import argparse
import os
import sys

from pydantic import SecretStr

from omlx.settings import add_arguments, home_directory, load_settings, overrides
from omlx.tools.dialogue import BAD_USAGE, Refused

_ACTIONS = {
    "stats": "what lies in the cache directory, by namespace",
    "verify": "read every file and check it",
    "ls": "list the files, chain by chain",
    "clear": "remove the cache files",
}


def add_cache_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cache = commands.add_parser("cache", help="look after the cache files on SSD")
    cache.set_defaults(run=lambda _: _usage(cache), computes=False)
    actions = cache.add_subparsers(dest="action", metavar="ACTION")
    for name, text in _ACTIONS.items():
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        action.set_defaults(run=run_cache, computes=False)
        action.add_argument("--url", help="ask this running server instead of reading a directory")
        action.add_argument("--json", action="store_true", help="print JSON")
        if name in ("ls", "clear"):
            action.add_argument("--namespace", metavar="NAME", help="only this one's files")
        if name == "verify":
            action.add_argument("--remove", action="store_true", help="remove corrupt files")
        if name == "clear":
            action.add_argument("--yes", action="store_true", help="don't ask")
            action.add_argument(
                "--tier",
                choices=("hot", "ssd", "all"),
                help="with --url: what to clear (default: ssd)",
            )
        add_arguments(action, ("ssd_cache_dir", "admin_key", "api_key"))


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return BAD_USAGE


def run_cache(arguments: argparse.Namespace) -> int:
    """Run one action; returns the exit code. Raises SettingsError."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # As with ``| head``: nobody reads on, and the interpreter's last flush must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Refused as refused:
        print(f"omlx: {refused}", file=sys.stderr)
        return refused.code


def _run(arguments: argparse.Namespace) -> int:
    given = overrides(arguments)
    home = home_directory(os.environ)
    # A broken settings file is the server's to set aside.
    loaded = load_settings(given, os.environ, home, set_aside=False)
    if arguments.url is None:
        if getattr(arguments, "tier", None) is not None:
            raise Refused("--tier needs --url: a directory is the ssd tier alone")
        from omlx.tools.on_directory import on_directory  # with NumPy, a tenth of a second

        return on_directory(arguments, loaded)
    if "ssd_cache_dir" in given:
        raise Refused("give --url or --ssd-cache-dir, not both")
    for name in ("namespace", "remove"):
        if getattr(arguments, name, None):
            raise Refused(f"--{name} works on a directory, not through a server")
    settings = loaded.settings
    from omlx.tools.cache_server import CacheServer
    from omlx.tools.on_server import on_server

    key = _key(settings.admin_key, settings.api_key)
    return on_server(arguments, CacheServer(arguments.url, key))


def _key(*keys: SecretStr | None) -> str | None:
    return next((key.get_secret_value() for key in keys if key is not None), None)
