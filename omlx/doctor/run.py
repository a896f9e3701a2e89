"""Everything in order: settings, probes, checks, report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from omlx.budget import (
    FLOAT32_SHARE,
    Budget,
    MemoryLine,
    host_memory_bytes,
    make_budget,
    make_plan,
    memory_lines,
    memory_warning,
    ssd_limits,
)
from omlx.doctor import checks, disk_checks
from omlx.doctor.child import ask_mlx
from omlx.doctor.disk import look_at_disk
from omlx.doctor.facts import Disk, Mlx
from omlx.doctor.finding import Finding, problem
from omlx.doctor.probes import (
    look_at_home,
    look_at_machine,
    look_at_model,
    look_at_packages,
    look_at_port,
)
from omlx.doctor.report import Report, as_json, as_text
from omlx.settings import (
    NAMES,
    Loaded,
    Settings,
    SettingsError,
    Source,
    env_name,
    home_directory,
)
from omlx.settings import load_settings as load

MLX_S = 11.0
"""How long MLX may take; with the rest it stays below 15 s."""

PROBLEMS = 1
"""The exit code when there are any."""


def run_doctor(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    json_wanted: bool,
) -> int:
    """Look, print, and return 0, or ``PROBLEMS``. Raises SettingsError for a flag of its own."""
    report = examine(flags, environ)
    print(json.dumps(as_json(report), indent=2) if json_wanted else as_text(report))
    return PROBLEMS if report.num_problems else 0


def examine(flags: Mapping[str, object], environ: Mapping[str, str]) -> Report:
    loaded, refused = _settings(flags, environ)
    settings = loaded.settings
    machine, packages = look_at_machine(), look_at_packages()
    disk = look_at_disk(settings.ssd_cache_dir)
    port = look_at_port(settings.host, settings.port)
    folder = look_at_model(settings.model, settings.model_dir)
    here = folder.path if folder.path is not None and not folder.to_fetch else None
    memory_bytes = int(FLOAT32_SHARE * settings.memory_budget.resolve(host_memory_bytes()))
    mlx = ask_mlx(here, memory_bytes, MLX_S)
    budget, lines, advice = _budget(loaded, mlx, disk)
    tier_on = settings.cache_enabled and not settings.ssd_cache_max_size.is_zero
    limit, floor = ssd_limits(loaded, disk.measured_in) if tier_on else (0, 0)
    found = [
        *checks.check_machine(machine, settings.max_connections),
        *checks.check_packages(packages, machine),
        *checks.check_mlx(mlx, machine),
        *checks.check_memory(machine, budget, advice, mlx.sketch),
        *disk_checks.check_disk(disk, limit, floor, named=loaded.is_set("ssd_cache_dir")),
        *(disk_checks.check_lock(disk, port) if tier_on else ()),
        *checks.check_port(port),
        *checks.check_model(folder, mlx),
        *checks.check_promises(mlx, machine, disk.read_bytes_per_s if tier_on else None),
        *checks.check_keys(loaded),
        *refused,
        *([] if refused else checks.check_settings(loaded)),
        *checks.check_home(look_at_home(loaded.home)),
    ]
    return Report(tuple(found), loaded, budget, lines, mlx, disk)


def _settings(
    flags: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[Loaded, list[Finding]]:
    """The settings, and what a server would refuse; each of those has its default instead."""
    home, rest = Path("/.omlx"), dict(environ)
    found: list[Finding] = []
    try:
        home = home_directory(environ)
        while True:
            try:
                return load(flags, rest, home, set_aside=False), found
            except SettingsError as error:
                variable = env_name(error.name) if error.name else ""
                if variable not in rest or error.name in flags:
                    raise
                found.append(_refused(error))
                del rest[variable]
    except SettingsError as error:
        if error.name in flags:
            raise
        found.append(_refused(error))
    defaults = Settings(model_dir=home / "models", ssd_cache_dir=home / "cache")
    return Loaded(defaults, {name: Source("default") for name in NAMES}, (), home), found


def _refused(error: SettingsError) -> Finding:
    text = f"a server would not start: {error}".rstrip(".")
    what = error.name or "all settings"
    return problem("settings", text, f"correct that; what is said here is of the default of {what}")


def _budget(
    loaded: Loaded, mlx: Mlx, disk: Disk
) -> tuple[Budget | None, tuple[MemoryLine, ...], str | None]:
    """The budget, its lines, and what to do when it is short."""
    if mlx.sketch is None or mlx.backend is None:
        return None, (), None
    settings, sketch = loaded.settings, mlx.sketch
    root = disk.measured_in if disk.writable and not settings.ssd_cache_max_size.is_zero else None
    budget = make_budget(loaded, sketch.cache, mlx.backend.working_set_bytes, root)
    plan = make_plan(budget, sketch.cache, sketch.weight_bytes, settings.prefill_step_tokens)
    context = min(settings.max_context or sketch.max_context, sketch.max_context)
    lines = memory_lines(budget, plan, settings, sketch.cache, context)
    return budget, lines, memory_warning(plan, context)
