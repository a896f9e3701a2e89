"""The official SDKs' own test suites, against a server of ours.

Their releases of source hold tests that send an example of every request and check the answer by
its type, loosely and strictly, by each kind of client. They are fetched in the versions that are
installed, so the SDK that is tested with is the one that is tested; without the package index, and
without what the extra ``clients`` brings, they are skipped.

SUITES names the files that apply. All others of ``tests/api_resources`` ask for what nobody serves
here: agents, assistants, audio, batches, containers, evaluations, files, fine-tuning, images,
moderations, organisations, realtime, skills, vaults, vector stores, videos and the like.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from anthropic.resources.messages import DEPRECATED_MODELS

from tests import talker
from tests.process import Server

pytestmark = pytest.mark.slow

for needed in ("hatchling", "hatch_fancy_pypi_readme", "http_snapshot", "inline_snapshot"):
    pytest.importorskip(needed, reason="the SDKs' tests need it; it is in the extra clients")

PATIENCE_S = 300.0
PLUGINS = ("cacheprovider", "aiohttp", "langsmith_plugin", "schemathesis")
"""Of ours, none of theirs; warnings are errors there."""


class LeftOut(NamedTuple):
    file: str
    test: str
    """In its name."""
    reason: str


@dataclass(frozen=True)
class Suite:
    package: str
    files: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    options: tuple[str, ...] = ()


STORED = "asks for an earlier answer, and none is kept here"
ONE_MODEL = "deletes a model"

SUITES = (
    Suite(
        "openai",
        ("chat/test_completions.py", "test_completions.py", "test_models.py", "test_responses.py"),
        (
            LeftOut("chat/test_completions.py", "_retrieve", STORED),
            LeftOut("chat/test_completions.py", "_update", STORED),
            LeftOut("chat/test_completions.py", "_list", STORED),
            LeftOut("chat/test_completions.py", "_delete", STORED),
            LeftOut(
                "resources/test_completions.py",
                "_with_all_params",
                "asks for a suffix, which needs a model that fills in, and for the best of 0",
            ),
            LeftOut("test_models.py", "_delete", ONE_MODEL),
            LeftOut(
                "test_responses.py",
                "_create_with_all_params",
                "asks for a stored response, a conversation, a prompt template and the background",
            ),
            LeftOut("test_responses.py", "_retrieve", STORED),
            LeftOut("test_responses.py", "_delete", STORED),
            LeftOut("test_responses.py", "_cancel", STORED),
            LeftOut("test_responses.py", "_compact", "asks for a summary that OpenAI encrypts"),
        ),
    ),
    Suite(
        "anthropic",
        ("test_messages.py", "test_models.py", "beta/test_messages.py", "beta/test_models.py"),
        (
            LeftOut(
                "beta/test_messages.py",
                "_with_all_params",
                "asks for MCP servers, which Anthropic's machines call",
            ),
        ),
        ("-p", "tests._alias_httpx"),
    ),
)

MODELS = (
    "claude-opus-5-5",
    "ft:gpt-4o-mini:acemeco:suffix:abc123",
    "gpt-3.5-turbo-instruct",
    "gpt-6-astra",
    "model",
    "model_id",
    *DEPRECATED_MODELS,
)
"""What the examples ask for; another release may name others."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = talker.build(tmp_path_factory.mktemp("model"))
    aliases = ",".join(f"{name}={model.name}" for name in MODELS)
    home = tmp_path_factory.mktemp("home")
    options = ("--model-aliases", aliases, "--default-max-tokens", "16")
    with Server(model, home, *options) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked releases of the installed SDKs. Skips where there is no package index."""
    folder = tmp_path_factory.mktemp("sources")
    names = [suite.package for suite in SUITES]
    fetch = ("download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary")
    pinned = [f"{name}=={version(name)}" for name in names]
    command = [sys.executable, "-m", "pip", *fetch, ",".join(names), "--dest", str(folder), *pinned]
    fetched = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    if fetched.returncode:
        pytest.skip(f"the SDKs' sources can't be fetched: {fetched.stderr.strip()[-300:]}")
    for archive in folder.glob("*.tar.gz"):
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    return folder


def run(folder: Path, url: str, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """pytest, in the suite's own folder and with its own settings but for the number of workers."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    without = [word for name in PLUGINS for word in ("-p", f"no:{name}")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", *without, *options],
        cwd=folder,
        env={**ours, "TEST_API_BASE_URL": url},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.package)
def test_the_suite_passes(suite: Suite, server: Server, sources: Path, tmp_path: Path) -> None:
    folder = sources / f"{suite.package}-{version(suite.package)}"
    files = [f"tests/api_resources/{name}" for name in suite.files]
    found = run(folder, server.url, [*suite.options, "--collect-only", *files])
    tests = [line for line in found.stdout.splitlines() if "::" in line]
    assert {test.split("::")[0] for test in tests} == set(files), found.stdout

    left_out = {row: [test for test in tests if _is(row, test)] for row in suite.left_out}
    assert all(left_out.values()), "a row of the table leaves nothing out"
    chosen = [test for test in tests if not any(_is(row, test) for row in suite.left_out)]
    listed = tmp_path / "chosen"
    listed.write_text("\n".join(chosen))

    done = run(folder, server.url, [*suite.options, "--tb=short", f"@{listed}"])

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith(f"{len(chosen)} passed in"), last
    print(f"{suite.package}: {last}, {len(tests) - len(chosen)} left out")


def _is(row: LeftOut, test: str) -> bool:
    file, _, name = test.partition("::")
    return file.endswith(row.file) and row.test in name
