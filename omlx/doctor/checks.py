"""Facts to findings. Pure: each function sees a machine only as it is written down in ``facts``."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import SecretStr

from omlx.budget import Budget, gigabytes
from omlx.cache.hybrid_cache import LayerKind
from omlx.doctor.facts import (
    Backend,
    Home,
    Machine,
    Mlx,
    ModelFolder,
    Packages,
    Port,
    Sketch,
    Speeds,
)
from omlx.doctor.finding import Finding, ok, problem, warning
from omlx.settings import SECRETS, Loaded, env_name, is_loopback

PYTHON_MIN = (3, 11)
GLIBC_MIN = (2, 35)
DRIVER_MIN = {"mlx-cuda-12": (550, 54), "mlx-cuda-13": (580,)}
MATMUL_GFLOPS_MIN = 20.0
"""Of a processor with a fast BLAS; the reference BLAS has a tenth of it."""

RESTORED_TOKENS = 1500
DEMO_BYTES = 300_000_000
"""Of disk, for a moment, while the demo model is fetched and converted."""

KEY_CHARACTERS_MIN = 8
"""Different ones, in a key that is hard to guess."""

_GUESSED_FIRST = ("password", "changeme", "secret", "letmein", "12345", "qwerty", "abcdef")
_FILES_BESIDES = 64
"""Open files besides connections: the cache's, the log, the model's."""


# ── machine and packages ─────────────────────────────────────────────────────────────────────


def check_machine(machine: Machine, max_connections: int) -> list[Finding]:
    area = "machine"
    found: list[Finding] = []
    python = ".".join(map(str, machine.python))
    if machine.python[:2] < PYTHON_MIN:
        found.append(problem(area, f"Python {python} is too old", "install Python 3.11 or newer"))
    if machine.system == "Linux":
        if machine.glibc is None:
            text = "the C library is not glibc, and MLX has no packages for another"
            found.append(problem(area, text, "use a system with glibc 2.35 or newer"))
        elif machine.glibc < GLIBC_MIN:
            text = f"glibc {machine.glibc[0]}.{machine.glibc[1]} is too old for MLX"
            found.append(problem(area, text, "use a system with glibc 2.35 or newer"))
    elif machine.system == "Darwin" and machine.architecture != "arm64":
        text = f"MLX needs Apple Silicon; this Python is {machine.architecture}"
        found.append(problem(area, text, "install a native arm64 Python"))
    if machine.open_files_max < max_connections + _FILES_BESIDES:
        text = (
            f"{machine.open_files_max} open files are allowed, and max_connections is "
            f"{max_connections}"
        )
        advice = f"run ulimit -n {max_connections + 4 * _FILES_BESIDES} before the start"
        found.append(warning(area, text, advice))
    if machine.is_busy:
        text = f"others keep it busy: load {machine.load:.1f} on {machine.cores} cores"
        found.append(warning(area, text, "measure again when it is idle; speeds below are low"))
    system = "macOS" if machine.system == "Darwin" else machine.system
    libc = f", glibc {machine.glibc[0]}.{machine.glibc[1]}" if machine.glibc else ""
    cores = f"{machine.cores} cores"
    return [ok(area, f"{system} {machine.architecture}, {cores}{libc}, Python {python}"), *found]


def check_packages(packages: Packages, machine: Machine) -> list[Finding]:
    area = "backend"
    found: list[Finding] = []
    for pin in packages.pins:
        if pin.found is None:
            text = f"{pin.name} is not installed"
            found.append(problem(area, text, f"pip install '{pin.name}{pin.wanted}'"))
        elif not pin.fits:
            text = f"{pin.name} {pin.found} is installed, and omlx is made for {pin.wanted}"
            found.append(problem(area, text, f"pip install '{pin.name}{pin.wanted}'"))
    if packages.backend_error is not None:
        text, _, advice = packages.backend_error.partition(". ")
        found.append(problem(area, text, advice or "install a backend of MLX"))
    if len(packages.backends) > 1:
        names = " and ".join(packages.backends)
        text = f"{names} are installed at once and overwrite each other's files"
        found.append(problem(area, text, "uninstall both, then install the one you need"))
    for name in packages.backends:
        wanted = DRIVER_MIN.get(name)
        if wanted is None:
            continue
        text = ".".join(map(str, wanted))
        if machine.driver is None:
            what = f"{name} is installed, and NVIDIA's driver was not found"
            found.append(problem(area, what, f"install a driver of version {text} or newer"))
        elif machine.driver < wanted:
            has = ".".join(map(str, machine.driver))
            what = f"NVIDIA's driver {has} is too old for {name}"
            found.append(problem(area, what, f"install a driver of version {text} or newer"))
    return found


# ── what MLX runs on ─────────────────────────────────────────────────────────────────────────


def check_mlx(mlx: Mlx, machine: Machine) -> list[Finding]:
    if mlx.backend is None:
        why = mlx.errors.get("backend", "it said nothing")
        if mlx.late:
            return [warning("backend", f"MLX is slow to start: {why}", "run omlx doctor again")]
        advice = "run python -c 'import mlx.core' to see it fail, and install mlx again"
        return [problem("backend", f"MLX does not work here: {why}", advice)]
    backend = mlx.backend
    device = f" ({backend.device})" if backend.device else ""
    on = {"metal": "Metal", "cuda": "CUDA", "cpu": "the CPU"}[backend.name]
    found = [ok("backend", f"MLX {backend.mlx_version} computes on {on}{device}")]
    found += _check_blas(backend)
    if mlx.speeds is None:
        why = mlx.errors.get("speeds", "it said nothing")
        found.append(warning("speed", f"not measured: {why}", "run omlx doctor again when idle"))
    else:
        found += _check_speeds(backend, mlx.speeds, machine)
    return found


def _check_blas(backend: Backend) -> list[Finding]:
    if not backend.blas_is_slow:
        return [ok("backend", f"BLAS: {backend.blas}")]
    text, _, advice = backend.blas.partition("; ")
    return [warning("backend", f"BLAS: {text}", advice or "install OpenBLAS")]


def _check_speeds(backend: Backend, speeds: Speeds, machine: Machine) -> list[Finding]:
    area = "speed"
    rate = f"{speeds.matmul_gflops:,.0f} GFLOP/s"
    if backend.name != "cpu":
        found = [ok(area, f"matrix products: {rate} in float16")]
    else:
        text = f"matrix products: {rate} in float32, {speeds.matmul_threads:.1f} cores at work"
        found = [ok(area, text)]
        if not machine.is_busy and not backend.blas_is_slow:
            if machine.cores > 1 and speeds.matmul_threads < 1.3:
                advice = "unset OPENBLAS_NUM_THREADS and OMP_NUM_THREADS, or install a threaded one"
                found = [warning(area, f"{text}: the BLAS uses one thread", advice)]
            elif speeds.matmul_gflops < MATMUL_GFLOPS_MIN:
                advice = "look for another program that uses the processor"
                found = [warning(area, f"{text}: slow for a fast BLAS", advice)]
    return [*found, ok(area, f"memory: {speeds.read_bytes_per_s / 1e9:,.1f} GB/s read by a decode")]


# ── memory ───────────────────────────────────────────────────────────────────────────────────


def check_memory(
    machine: Machine, budget: Budget | None, advice: str | None, sketch: Sketch | None
) -> list[Finding]:
    """``advice``: what to do about a budget that is short."""
    area = "memory"
    limit = ""
    if machine.cgroup_bytes is not None and machine.cgroup_bytes < machine.ram_bytes:
        limit = f", limited to {gigabytes(machine.cgroup_bytes)} by a cgroup"
    text = f"RAM {gigabytes(machine.ram_bytes)}{limit}, {gigabytes(machine.available_bytes)} free"
    found = [ok(area, text)]
    if budget is None or sketch is None:
        return found
    if sketch.weight_bytes > budget.total_bytes:
        what = (
            f"the weights take {gigabytes(sketch.weight_bytes)}, the budget is "
            f"{gigabytes(budget.total_bytes)}"
        )
        return [*found, problem(area, what, "serve a smaller model or a quantised one")]
    if advice is not None:
        what, _, remedy = advice.partition("; ")
        found.append(warning(area, what, remedy))
    if not budget.on_device and sketch.weight_bytes > machine.available_bytes:
        what = f"the weights take {gigabytes(sketch.weight_bytes)}, more than is free now"
        found.append(warning(area, what, "end other programs before the start"))
    return found


# ── port ─────────────────────────────────────────────────────────────────────────────────────


def check_port(port: Port) -> list[Finding]:
    area = "port"
    place = f"{port.host}:{port.port}"
    match port.state:
        case "free":
            text = "any free port will be taken" if port.port == 0 else f"{place} is free"
            return [ok(area, text)]
        case "denied":
            advice = "choose a port above 1023 with --port"
            return [problem(area, f"this user may not listen on {place}", advice)]
        case "no_such_address":
            text = f"can't listen on {place}: {port.status}"
            return [problem(area, text, "set host to an address of this machine")]
        case "taken":
            pass
    if port.answer == "omlx":
        return [ok(area, f"an omlx server answers on {place}: {port.status}")]
    advice = "stop that program, or choose another port with --port"
    if port.answer == "http":
        name = f" ({port.status[:60]!r})" if port.status else ""
        return [problem(area, f"{place} is taken by another web server{name}", advice)]
    return [problem(area, f"{place} is taken by a program that does not answer HTTP", advice)]


# ── settings and keys ────────────────────────────────────────────────────────────────────────


def check_settings(loaded: Loaded) -> list[Finding]:
    """What is set and does not do what one may think."""
    area = "settings"
    found = [warning(area, *_split(text, "look at the settings below")) for text in loaded.warnings]
    if not found:
        found.append(ok(area, "each one that is set is known"))
    return found


def _split(text: str, otherwise: str) -> tuple[str, str]:
    """A warning of the settings, and what to do: its own last part, if it has one."""
    for sign in ("; ", ". "):
        what, found, advice = text.rstrip(".").partition(sign)
        if found:
            return what, advice
    return text.rstrip("."), otherwise


def check_keys(loaded: Loaded) -> list[Finding]:
    """Who can reach the server, and how hard its keys are to guess. Never quotes a key."""
    area = "safety"
    settings = loaded.settings
    keys: Mapping[str, SecretStr | None] = {
        name: getattr(settings, name) for name in sorted(SECRETS)
    }
    found: list[Finding] = []
    if is_loopback(settings.host):
        who = "with a key" if settings.api_key else "without a key"
        found.append(ok(area, f"only this machine reaches it ({settings.host}), {who}"))
    else:
        text = f"other machines reach it on {settings.host}; keys and prompts travel in clear text"
        advice = "put a proxy with TLS in front, and bind 127.0.0.1"
        found.append(warning(area, text, advice))
    for name, key in keys.items():
        if key is None:
            continue
        text = key.get_secret_value()
        if loaded.sources[name].kind == "cli":
            what = f"{name} is given as a flag, which every user of this machine can see"
            found.append(warning(area, what, f"set {env_name(name)} instead"))
        easy = any(word in text.lower() for word in _GUESSED_FIRST)
        if easy or len(set(text)) < KEY_CHARACTERS_MIN:
            advice = "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            found.append(warning(area, f"{name} is easy to guess", advice))
    return found


def check_home(home: Home) -> list[Finding]:
    if home.writable:
        return []
    text = f"{home.path} can't be written: settings and statistics will not be saved"
    return [warning("settings", text, "set OMLX_HOME to a folder that this user may write")]


# ── the model ────────────────────────────────────────────────────────────────────────────────


def check_model(folder: ModelFolder, mlx: Mlx) -> list[Finding]:
    area = "model"
    if folder.path is None:
        advice = "name another with --model, or fetch one with omlx pull"
        return [problem(area, folder.fault, advice)]
    if folder.to_fetch:
        text = f"{folder.name} is not there yet; the first start fetches it"
        name = "demo" if folder.to_fetch == "demo" else folder.name
        if folder.free_bytes < DEMO_BYTES:
            text = f"{folder.name} is not there yet, and {gigabytes(folder.free_bytes)} are free"
            return [problem(area, text, "make room, or set model_dir to another volume")]
        return [warning(area, text, f"omlx pull {name} fetches it now")]
    sketch = mlx.sketch
    if sketch is None:
        why = mlx.errors.get("sketch", "not asked")
        if mlx.late:
            advice = "run omlx doctor again when the machine is idle"
            return [warning(area, f"{folder.name} is whole; not opened: {why}", advice)]
        if mlx.backend is None:
            advice = "mend what is said of the backend first"
            return [warning(area, f"{folder.name} is whole; not opened: {why}", advice)]
        advice = "serve another model with --model"
        return [problem(area, f"{folder.name} can't be served: {why}", advice)]
    cache = sketch.cache
    kinds = ", ".join(f"{count} {kind}" for kind in LayerKind if (count := cache.count(kind)))
    text = (
        f"{folder.name}: layers {kinds}; weights {gigabytes(sketch.weight_bytes)} in "
        f"{sketch.weight_dtype}, context {sketch.max_context:,}"
    )
    found = [ok(area, text)]
    if cache.why_not_cacheable is not None:
        what = f"its prefixes can't be reused: {cache.why_not_cacheable}"
        found.append(warning(area, what, "serve another model to have a cache"))
    found += [warning(area, *_split(note, "add memory")) for note in sketch.notes]
    return found


def check_promises(mlx: Mlx, machine: Machine, read_bytes_per_s: float | None) -> list[Finding]:
    """What the start-up lines promise, in seconds on this machine."""
    found: list[Finding] = []
    if mlx.sketch is None:
        return found
    if mlx.speeds is not None:
        most = mlx.speeds.read_bytes_per_s / max(1, mlx.sketch.weight_bytes)
        # Measured beside others it is no bound: a server may find the machine idle.
        bound = "some" if machine.is_busy else "at most"
        text = (
            f"decoding one row: {bound} {most:,.1f} tokens/s at this memory speed, since each "
            f"token reads {gigabytes(mlx.sketch.weight_bytes)} of weights"
        )
        found.append(ok("promise", text))
    cache = mlx.sketch.cache
    if read_bytes_per_s is not None and cache.why_not_cacheable is None:
        size = RESTORED_TOKENS * cache.bytes_per_token + cache.checkpoint_bytes
        text = (
            f"a prefix of {RESTORED_TOKENS:,} tokens comes back from disk in "
            f"{1000 * size / read_bytes_per_s:,.0f} ms ({gigabytes(size)})"
        )
        found.append(ok("promise", text))
    return found
