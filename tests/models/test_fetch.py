"""A repository arrives whole under its own name, or not at all and with a clear sentence.

The hub here is a few lines on the loopback address; the client is the real one.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from omlx.models import fetch as fetch_module
from omlx.models.locate import locate, what_is_missing

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/small"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": save({"a": np.zeros(1000, np.float32)}),
    "pytorch_model.bin": b"the same weights again",
}


class Hub(BaseHTTPRequestHandler):
    files = FILES

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{REPO}/tree/"):
            self.reply(json.dumps([self.entry(name) for name in self.files]).encode())
        elif path.startswith(f"/api/models/{REPO}"):
            self.reply(json.dumps({"id": REPO, "sha": COMMIT, "siblings": []}).encode())
        elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            self.reply(self.files[path.rpartition("/")[2]])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def entry(self, name: str) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": etag(name)}

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{etag(self.path.rpartition("/")[2])}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


def etag(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


PROGRAM = """
import sys
from pathlib import Path
from omlx.models.fetch import fetch
from omlx.models.locate import ModelUnavailable

try:
    print(fetch(sys.argv[1], Path(sys.argv[2]), lambda *now: print(*now)))
except ModelUnavailable as error:
    print("unavailable:", error)
"""


def fetch(repo_id: str, model_dir: Path, endpoint: str) -> list[str]:
    """Run ``fetch`` in a process of its own: the client reads its address at import."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(model_dir.parent / "hf-home"),
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(Path(fetch_module.__file__).parents[2]),
    }
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, repo_id, str(model_dir)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_repository_arrives_whole_without_what_mlx_does_not_read(
    hub: str, tmp_path: Path
) -> None:
    total_bytes = sum(len(FILES[name]) for name in FILES if name != "pytorch_model.bin")

    *progress, path = fetch(REPO, tmp_path / "models", hub)

    assert path == str(tmp_path / "models" / "org" / "small")
    assert progress[-1] == f"{REPO} {total_bytes} {total_bytes}"
    assert what_is_missing(Path(path)) is None
    assert not (Path(path) / "pytorch_model.bin").exists()
    assert locate(REPO, tmp_path / "models").to_fetch is None


def test_what_is_here_is_not_fetched_again(hub: str, tmp_path: Path) -> None:
    fetch(REPO, tmp_path / "models", hub)

    assert fetch(REPO, tmp_path / "models", "http://127.0.0.1:9") == [
        str(tmp_path / "models" / "org" / "small")
    ]


def test_an_unknown_repository_is_named(hub: str, tmp_path: Path) -> None:
    (said,) = fetch("org/typo", tmp_path / "models", hub)

    assert said.startswith("unavailable: Hugging Face has no repository org/typo")
    assert not (tmp_path / "models" / "org").exists()


def test_without_a_network_the_sentence_says_so(tmp_path: Path) -> None:
    (said,) = fetch(REPO, tmp_path / "models", "http://127.0.0.1:9")

    assert "Hugging Face cannot be reached" in said
    assert not (tmp_path / "models" / "org").exists()


def test_a_repository_without_weights_is_refused(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "files", {"config.json": FILES["config.json"]})

    said = fetch(REPO, tmp_path / "models", hub)[-1]

    assert "is not a model that mlx-lm loads: no weights" in said
    assert not (tmp_path / "models" / "org").exists()
