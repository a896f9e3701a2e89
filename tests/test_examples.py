"""What we hand out to run the server as a service starts this server, and lets it stop in time."""

from __future__ import annotations

import configparser
import plistlib
import re
import shlex
from pathlib import Path

import pytest

from omlx.budget import AUTO_PENDING_SHARE
from omlx.cli import make_parser
from omlx.live_settings import DRAIN_S, FLUSH_BYTES_PER_S
from omlx.settings import HOME_VARIABLE, NAMES, Settings, env_name

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
UNITS = sorted(EXAMPLES.glob("*.service"))
PLIST = EXAMPLES / "com.omlx.server.plist"
LARGE_RAM_BYTES = 128_000_000_000


def read_unit(path: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes="#")
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read_string(path.read_text("utf-8"))
    return parser


def commands() -> list[tuple[str, list[str]]]:
    found = [(path.name, shlex.split(read_unit(path)["Service"]["ExecStart"])) for path in UNITS]
    return [*found, (PLIST.name, plistlib.loads(PLIST.read_bytes())["ProgramArguments"])]


def stop_needs_s() -> float:
    """Draining, then twice the last writes (scheduler and writer), with much RAM."""
    pending = AUTO_PENDING_SHARE * LARGE_RAM_BYTES
    return Settings().drain_timeout_s + 2 * (DRAIN_S + pending / FLUSH_BYTES_PER_S)


def test_there_is_a_unit_for_the_system_and_one_for_a_user() -> None:
    assert [path.name for path in UNITS] == ["omlx.service", "omlx.user.service"]


@pytest.mark.parametrize(("name", "command"), commands())
def test_the_command_and_its_flags_are_ours(name: str, command: list[str]) -> None:
    arguments = make_parser().parse_args(command[1:])

    assert Path(command[0]).name == "omlx", name
    assert arguments.command == "serve"


@pytest.mark.parametrize("path", [*UNITS, PLIST], ids=lambda path: path.name)
def test_every_variable_that_is_named_exists(path: Path) -> None:
    known = {HOME_VARIABLE, *map(env_name, NAMES)}

    named = set(re.findall(r"\bOMLX_[A-Z_]+", path.read_text("utf-8")))

    assert named and named <= known


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_what_a_restart_would_not_change_is_not_restarted(path: Path) -> None:
    service = read_unit(path)["Service"]

    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"].split() == ["2", "3", "4", "5"]


def test_a_stop_has_time_to_drain_and_to_write() -> None:
    limits = [int(read_unit(path)["Service"]["TimeoutStopSec"]) for path in UNITS]
    limits.append(plistlib.loads(PLIST.read_bytes())["ExitTimeOut"])

    assert min(limits) > stop_needs_s()


def test_the_system_unit_may_write_where_its_files_are_and_nowhere_else() -> None:
    service = read_unit(EXAMPLES / "omlx.service")["Service"]

    home = service["Environment"].removeprefix(f"{HOME_VARIABLE}=")

    assert service["ProtectSystem"] == "strict"
    assert service["ReadWritePaths"].split() == [home]
    assert home == f"/var/lib/{service['StateDirectory']}"
    assert service["StateDirectoryMode"] == "0700"


def test_the_agent_starts_again_after_a_failure_only_and_keeps_its_files_private() -> None:
    agent = plistlib.loads(PLIST.read_bytes())

    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["Umask"] == 0o077
    assert agent["Label"] == PLIST.stem
    assert agent["SoftResourceLimits"]["NumberOfFiles"] > Settings().max_connections
