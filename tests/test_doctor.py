"""The doctor judges facts, finds them out without a trace, and works where little else does."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from omlx.budget import Budget
from omlx.cache.factory import CacheSizes
from omlx.cache.hybrid_cache import LayerConfig, LayerKind, ModelCacheConfig
from omlx.cli import main
from omlx.doctor import checks, disk, disk_checks, run
from omlx.doctor.child import understand
from omlx.doctor.facts import (
    LEFT_FREE_BYTES,
    Backend,
    Disk,
    Home,
    Machine,
    Mlx,
    ModelFolder,
    Packages,
    Pin,
    Port,
    Sketch,
    Speeds,
)
from omlx.doctor.finding import Finding
from omlx.doctor.probes import look_at_machine, look_at_model, look_at_packages, look_at_port
from omlx.doctor.report import WIDTH, as_json, as_text
from omlx.settings import SettingsError, load_settings

GB = 1_000_000_000
KEY = "Zx9-correct-horse-battery-7Qw"

MACHINE = Machine("Linux", "x86_64", (3, 11, 7), (2, 36), 8, 0.5, 64 * GB, 60 * GB, None, 4096)
PACKAGES = Packages((Pin("mlx", ">=0.32,<0.33", "0.32.4", True),), ("mlx-cpu",), None)
BACKEND = Backend("cpu", "Xeon", "0.32.4", None, "OpenBLAS 0.3.21 (preloaded)", False)
SPEEDS = Speeds(200.0, 7.5, 20e9)
CACHE = ModelCacheConfig((LayerConfig(LayerKind.KV, 2, 64, 64, "float32"),))
SKETCH = Sketch(CACHE, 8192, 2 * GB, "float32", ())
MLX = Mlx(BACKEND, SPEEDS, SKETCH)
DISK = Disk(Path("/c"), True, Path("/c"), True, 0o700, "ext4", 500 * GB, 400 * GB)
FAST = replace(DISK, write_bytes_per_s=1e9, read_bytes_per_s=2e9)
FREE = Port("127.0.0.1", 8000, "free")
HERE = ModelFolder("m", Path("/m"))


def bad(findings: list[Finding]) -> list[Finding]:
    """Those that are not ok; each of them says what to do."""
    found = [finding for finding in findings if finding.level != "ok"]
    assert all(finding.advice for finding in found)
    return found


def only(findings: list[Finding], level: str) -> str:
    """The text of the one thing that is wrong, which is as bad as ``level``."""
    (finding,) = bad(findings)
    assert finding.level == level
    return f"{finding.text} -> {finding.advice}"


# ── machine and packages ─────────────────────────────────────────────────────────────────────


def test_nothing_is_wrong_with_an_ordinary_machine() -> None:
    assert not bad(checks.check_machine(MACHINE, 512))
    assert not bad(checks.check_packages(PACKAGES, MACHINE))
    assert not bad(checks.check_mlx(MLX, MACHINE))
    assert not bad(disk_checks.check_disk(FAST, 50 * GB, 25 * GB, named=False))
    assert not bad(checks.check_port(FREE))
    assert not bad(checks.check_model(HERE, MLX))


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"python": (3, 10, 2)}, "problem", "Python 3.10.2 is too old"),
        ({"glibc": (2, 31)}, "problem", "glibc 2.31 is too old"),
        ({"glibc": None}, "problem", "not glibc"),
        ({"system": "Darwin", "glibc": None}, "problem", "Apple Silicon"),
        ({"open_files_max": 256}, "warning", "ulimit -n"),
        ({"load": 9.0}, "warning", "load 9.0 on 8 cores"),
    ],
)
def test_what_is_wrong_with_a_machine(changes: dict[str, object], level: str, words: str) -> None:
    assert words in only(checks.check_machine(replace(MACHINE, **changes), 512), level)


def test_packages_that_do_not_fit_are_named_with_the_command_that_mends_them() -> None:
    old = replace(PACKAGES, pins=(Pin("mlx-lm", "==0.32.2", "0.31.0", False),))
    none = replace(PACKAGES, pins=(Pin("mlx", ">=0.32", None, False),))
    both = replace(PACKAGES, backends=("mlx-cuda-12", "mlx-cpu"))

    assert "pip install 'mlx-lm==0.32.2'" in only(checks.check_packages(old, MACHINE), "problem")
    assert "not installed" in only(checks.check_packages(none, MACHINE), "problem")
    machine = replace(MACHINE, driver=(560, 1))
    assert "overwrite" in only(checks.check_packages(both, machine), "problem")


@pytest.mark.parametrize(
    ("driver", "is_bad"), [(None, True), ((550, 53), True), ((550, 54, 14), False), ((580,), False)]
)
def test_cuda_needs_a_driver_that_is_new_enough(
    driver: tuple[int, ...] | None, is_bad: bool
) -> None:
    packages = replace(PACKAGES, backends=("mlx-cuda-12",))

    assert bool(bad(checks.check_packages(packages, replace(MACHINE, driver=driver)))) == is_bad


# ── what MLX runs on ─────────────────────────────────────────────────────────────────────────


def test_a_broken_mlx_is_one_problem_that_quotes_the_cause() -> None:
    mlx = Mlx(errors={"backend": "MLX has no backend here"})

    assert "MLX has no backend here" in only(checks.check_mlx(mlx, MACHINE), "problem")


def test_the_reference_blas_is_a_warning_with_what_to_install() -> None:
    slow = replace(BACKEND, blas="reference BLAS: slow; apt install x", blas_is_slow=True)

    text = only(checks.check_mlx(replace(MLX, backend=slow), MACHINE), "warning")

    assert text == "BLAS: reference BLAS: slow -> apt install x"


def test_one_thread_on_many_cores_is_a_warning_unless_others_take_the_cores() -> None:
    mlx = replace(MLX, speeds=Speeds(60.0, 1.0, 20e9))

    assert "one thread" in only(checks.check_mlx(mlx, MACHINE), "warning")
    assert not bad(checks.check_mlx(mlx, replace(MACHINE, load=20.0)))
    assert not bad(checks.check_mlx(mlx, replace(MACHINE, cores=1)))


def test_what_the_child_said_before_it_died_is_kept() -> None:
    backend = {"part": "backend", "value": {**_fields(BACKEND)}}
    output = f"a library's banner\n{json.dumps(backend)}\n{{broken"

    mlx = understand(output, "it was ended by SIGSEGV")

    assert mlx.backend == BACKEND
    assert mlx.speeds is None and mlx.sketch is None
    assert mlx.errors == {part: "it was ended by SIGSEGV" for part in ("speeds", "sketch")}
    assert "SIGSEGV" in only(checks.check_mlx(mlx, MACHINE), "warning")


def _fields(backend: Backend) -> dict[str, object]:
    return {name: getattr(backend, name) for name in Backend.__dataclass_fields__}


# ── memory ───────────────────────────────────────────────────────────────────────────────────


def test_weights_beyond_the_budget_are_a_problem_and_a_full_house_is_a_warning() -> None:
    budget = Budget(10 * GB, "90% of the RAM", CacheSizes(256, 0, 0, 0))
    large = replace(SKETCH, weight_bytes=11 * GB)
    advice = "there is room for 10 tokens; raise memory_budget"

    assert "weights" in only(checks.check_memory(MACHINE, budget, None, large), "problem")
    assert "raise memory" in only(checks.check_memory(MACHINE, budget, advice, SKETCH), "warning")
    assert not bad(checks.check_memory(MACHINE, budget, None, SKETCH))
    assert not bad(checks.check_memory(MACHINE, None, None, None))


def test_weights_that_fit_but_not_now_are_a_warning() -> None:
    budget = Budget(50 * GB, "90% of the RAM", CacheSizes(256, 0, 0, 0))
    full = replace(MACHINE, available_bytes=GB)

    assert "end other programs" in only(checks.check_memory(full, budget, None, SKETCH), "warning")
    assert not bad(checks.check_memory(full, replace(budget, on_device=True), None, SKETCH))


# ── disk ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"filesystem": "nfs4"}, "warning", "network"),
        ({"filesystem": "fuse.sshfs"}, "warning", "network"),
        ({"filesystem": "tmpfs"}, "warning", "memory"),
        ({"filesystem": "overlay"}, "warning", "container"),
        ({"mode": 0o755}, "warning", "chmod -R go= /c"),
        ({"free_bytes": LEFT_FREE_BYTES - 1, "volume_bytes": GB}, "problem", "full"),
        ({"free_bytes": 24 * GB}, "warning", "ssd_free_space_floor"),
        ({"read_bytes_per_s": 20e6}, "warning", "slow"),
        ({"read_bytes_per_s": None, "error": "No space left"}, "problem", "No space left"),
    ],
)
def test_what_is_wrong_with_a_disk(changes: dict[str, object], level: str, words: str) -> None:
    there = replace(FAST, **changes)

    assert words in only(disk_checks.check_disk(there, 50 * GB, 25 * GB, named=True), level)


def test_a_folder_that_cannot_be_used_stops_a_server_only_if_it_was_named() -> None:
    closed = replace(DISK, writable=False)

    assert only(disk_checks.check_disk(closed, GB, 0, named=True), "problem")
    assert "would be off" in only(disk_checks.check_disk(closed, GB, 0, named=False), "warning")
    assert not bad(disk_checks.check_disk(closed, 0, 0, named=True)), "the tier is off"


def test_a_locked_folder_is_fine_only_if_its_server_is_the_one_on_our_port() -> None:
    held = replace(DISK, holder=4711)
    ours = replace(FREE, state="taken", answer="omlx")

    assert not bad(disk_checks.check_lock(held, ours))
    assert "4711" in only(disk_checks.check_lock(held, FREE), "problem")
    assert disk_checks.check_lock(DISK, FREE) == []


def test_measuring_leaves_nothing_and_makes_no_folder(tmp_path: Path) -> None:
    root = tmp_path / "home" / "cache"

    found = disk.look_at_disk(root)

    assert not found.exists and found.writable and found.measured_in == tmp_path
    assert found.read_bytes_per_s is not None and found.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_it_is_measured_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    found = disk.look_at_disk(tmp_path)
    monkeypatch.undo()

    assert found.write_bytes_per_s is None and found.error == os.strerror(errno.ENOSPC)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")

    found = disk.look_at_disk(tmp_path / "cache")

    assert "no folder" in only(disk_checks.check_disk(found, GB, 0, named=True), "problem")


def test_the_process_that_has_the_folder_is_known_and_not_disturbed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("4711\n")
    assert disk.holder_of(tmp_path) is None, "a file that nobody locks"

    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert disk.holder_of(tmp_path) == 4711

    assert disk.holder_of(tmp_path / "absent") is None
    assert lock.read_text() == "4711\n"


# ── port ─────────────────────────────────────────────────────────────────────────────────────


class Answering(BaseHTTPRequestHandler):
    server_version = "Other/1"
    pages: dict[str, bytes] = {}  # noqa: RUF012 - each test makes a class of its own

    def do_GET(self) -> None:
        page = self.pages.get(self.path)
        self.send_response(404 if page is None else 200)
        self.send_header("Content-Length", str(len(page or b"")))
        self.end_headers()
        self.wfile.write(page or b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


def port_of(pages: dict[str, bytes]) -> Port:
    """What the probe finds where a server with these pages listens."""
    handler = type("Handler", (Answering,), {"pages": pages})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            return look_at_port("127.0.0.1", server.server_port)
        finally:
            server.shutdown()
            thread.join()


def test_a_free_port_is_free_and_stays_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]

    assert [look_at_port("127.0.0.1", number).state for _ in range(2)] == ["free", "free"]


def test_a_server_of_ours_is_told_from_a_stranger() -> None:
    ours = port_of({"/admin/login": b"<title>omlx", "/health": b'{"status":"ok","model":"m"}'})
    stranger = port_of({"/health": b'{"status":"ok"}'})

    assert (ours.answer, ours.status) == ("omlx", "ok m")
    assert not bad(checks.check_port(ours))
    assert stranger.answer == "http"
    assert "another web server ('Other/1" in only(checks.check_port(stranger), "problem")


def test_a_port_whose_owner_is_silent_is_a_problem() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        found = look_at_port("127.0.0.1", taken.getsockname()[1])

    assert (found.state, found.answer) == ("taken", "silence")
    assert "--port" in only(checks.check_port(found), "problem")


def test_an_address_of_another_machine_is_a_problem() -> None:
    found = look_at_port("192.0.2.1", 20000)

    assert found.state == "no_such_address"
    assert only(checks.check_port(found), "problem")


# ── settings and keys ────────────────────────────────────────────────────────────────────────


def test_a_key_that_is_easy_to_guess_is_told_and_never_quoted(tmp_path: Path) -> None:
    for key in ("my-password-is-very-long", "aaaaaaaaaaaaaaaaaaaaaaaa"):
        found = checks.check_keys(load_settings({}, {"OMLX_API_KEY": key}, tmp_path))

        text = only(found, "warning")
        assert "api_key is easy to guess" in text and key not in text


def test_a_good_key_is_fine_but_not_as_a_flag(tmp_path: Path) -> None:
    in_environment = load_settings({}, {"OMLX_API_KEY": KEY}, tmp_path)
    as_flag = load_settings({"api_key": KEY}, {}, tmp_path)

    assert not bad(checks.check_keys(in_environment))
    assert "OMLX_API_KEY" in only(checks.check_keys(as_flag), "warning")


def test_other_machines_reach_an_open_address(tmp_path: Path) -> None:
    loaded = load_settings({"host": "0.0.0.0"}, {"OMLX_API_KEY": KEY}, tmp_path)

    assert "TLS" in only(checks.check_keys(loaded), "warning")


def test_an_unknown_variable_is_told_with_the_one_that_was_meant(tmp_path: Path) -> None:
    loaded = load_settings({}, {"OMLX_PROT": "1"}, tmp_path)

    text = only(checks.check_settings(loaded), "warning")

    assert "OMLX_PROT" in text and "did you mean OMLX_PORT?" in text


def test_an_unwritable_home_is_told() -> None:
    assert "OMLX_HOME" in only(checks.check_home(Home(Path("/h"), True, False)), "warning")
    assert checks.check_home(Home(Path("/h"), True, True)) == []


# ── model ────────────────────────────────────────────────────────────────────────────────────


def test_a_model_that_is_absent_is_fetched_if_there_is_room(tmp_path: Path) -> None:
    found = look_at_model("demo", tmp_path)

    assert "omlx pull demo" in only(checks.check_model(found, MLX), "warning")
    full = replace(found, free_bytes=0)
    assert "make room" in only(checks.check_model(full, MLX), "problem")
    assert only(checks.check_model(look_at_model("nobody", tmp_path), MLX), "problem")


def test_a_model_that_mlx_refuses_is_a_problem_unless_mlx_itself_is_broken() -> None:
    refused = replace(MLX, sketch=None, errors={"sketch": "Model type x not supported"})
    broken = Mlx(errors={"backend": "gone", "sketch": "gone"})

    assert "not supported" in only(checks.check_model(HERE, refused), "problem")
    assert "not opened" in only(checks.check_model(HERE, broken), "warning")


def test_what_took_too_long_is_no_verdict() -> None:
    late = Mlx(BACKEND, errors={"speeds": "no answer", "sketch": "no answer"}, late=True)

    assert "no answer" in only(checks.check_model(HERE, late), "warning")
    assert "no answer" in only(checks.check_mlx(late, MACHINE), "warning")
    assert "slow to start" in only(checks.check_mlx(Mlx(late=True), MACHINE), "warning")


def test_promises_follow_from_what_was_measured() -> None:
    texts = [finding.text for finding in checks.check_promises(MLX, MACHINE, 2e9)]

    assert "at most 10.0 tokens/s" in texts[0]
    busy = checks.check_promises(MLX, replace(MACHINE, load=20.0), 2e9)[0].text
    assert "at most" not in busy, "others took a part of what was measured"
    assert "comes back from disk in 1 ms (1.5 MB)" in texts[1]
    assert checks.check_promises(Mlx(), MACHINE, 2e9) == []


# ── the whole ────────────────────────────────────────────────────────────────────────────────


def doctor(home: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OMLX_")}
    return subprocess.run(
        [sys.executable, "-m", "omlx", "doctor", *flags],
        env={**inherited, "OMLX_HOME": str(home), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_with_a_broken_mlx_it_still_says_everything_else(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "mlx"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("")
    (broken / "core.py").write_text("import os; os.abort()")
    here = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([str(broken.parent), here])

    asked = doctor(tmp_path / "home", "--json", "--port", "0", PYTHONPATH=path, OMLX_API_KEY=KEY)

    report = json.loads(asked.stdout)
    problems = [f["text"] for f in report["findings"] if f["level"] == "problem"]
    assert asked.returncode == run.PROBLEMS and not report["ok"]
    assert problems == ["MLX does not work here: it was ended by SIGABRT"]
    assert {"machine", "disk", "port", "model", "safety"} <= {f["area"] for f in report["findings"]}
    assert KEY not in asked.stdout + asked.stderr
    assert not (tmp_path / "home").exists()


def test_a_flag_that_is_refused_is_bad_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMLX_HOME", str(tmp_path))

    assert main(["doctor", "--port", "abc"]) == 2
    assert "--port 'abc'" in capsys.readouterr().err


def test_what_a_server_would_refuse_is_a_problem_and_the_rest_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ask_mlx", lambda *_: MLX)
    environ = {"OMLX_HOST": "0.0.0.0", "OMLX_DRAIN_TIMEOUT_S": "x", "OMLX_PORT": "0"}

    report = run.examine({}, {**environ, "OMLX_HOME": str(tmp_path)})

    problems = [f.text for f in report.findings if f.level == "problem"]
    assert len(problems) == 2 and "OMLX_DRAIN" in problems[0] and "OMLX_HOST" in problems[1]
    assert report.settings == [("port", "0", "env OMLX_PORT")]
    with pytest.raises(SettingsError):
        run.examine({"port": "abc"}, {"OMLX_HOME": str(tmp_path)})


def test_a_broken_settings_file_is_told_and_left_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ask_mlx", lambda *_: MLX)
    (tmp_path / "settings.json").write_text('{"port": ')

    report = run.examine({}, {"OMLX_HOME": str(tmp_path)})

    assert "is broken" in next(f.text for f in report.findings if f.level == "problem")
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_text_and_json_say_the_same_and_neither_holds_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ask_mlx", lambda *_: MLX)
    environ = {"OMLX_API_KEY": KEY, "OMLX_HOME": str(tmp_path), "OMLX_PORT": "0"}

    report = run.examine({}, environ)
    text, plain = as_text(report), as_json(report)

    assert KEY not in text + json.dumps(plain)
    assert "api_key = set  (env OMLX_API_KEY)" in text
    unwrapped = " ".join(text.split())
    assert all(" ".join(f["text"].split()) in unwrapped for f in plain["findings"])
    assert sum(line["bytes"] for line in plain["memory"]["lines"]) > 0
    long = [line for line in text.splitlines() if len(line) > WIDTH and str(tmp_path) not in line]
    assert not long


def test_this_machine_and_its_packages_fit() -> None:
    assert not [f for f in checks.check_machine(look_at_machine(), 1) if f.level == "problem"]
    assert not bad(checks.check_packages(look_at_packages(), look_at_machine()))
