"""Settings say where they come from, refuse what they cannot mean, and fail closed."""

from __future__ import annotations

import argparse
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pydantic import ValidationError

from omlx.settings import (
    NAMES,
    SECRETS,
    Loaded,
    Settings,
    SettingsError,
    Source,
    add_arguments,
    constraints,
    describe,
    env_name,
    flag,
    home_directory,
    is_loopback,
    load_settings,
    overrides,
    reread,
    save_settings_file,
    settings_table,
)
from omlx.sizes import Size

KEY = "sk-test-ABCDEF123456"
README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def load(home: Path, env: Mapping[str, str] | None = None, **flags: object) -> Loaded:
    return load_settings(flags, env or {}, home)


def write(home: Path, text: str | bytes) -> Path:
    home.mkdir(exist_ok=True)
    path = home / "settings.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o600)
    return path


def refusal(home: Path, env: Mapping[str, str] | None = None, **flags: object) -> str:
    with pytest.raises(SettingsError) as refused:
        load(home, env, **flags)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ── sources ──────────────────────────────────────────────────────────────────────────────────


def test_without_any_source_the_defaults_hold(home: Path) -> None:
    loaded = load(home)

    assert loaded.settings.port == 8000
    assert loaded.settings.ssd_cache_dir == home / "cache"
    assert loaded.settings.model_dir == home / "models"
    assert set(loaded.sources.values()) == {Source("default")}
    assert loaded.warnings == ()
    assert not home.exists()


def test_flag_beats_variable_beats_file_beats_default(home: Path) -> None:
    path = write(home, '{"port": 1, "log_level": "debug", "max_context": 5}')
    env = {"OMLX_PORT": "2", "OMLX_LOG_LEVEL": "error"}

    loaded = load(home, env, port="3")

    assert (loaded.settings.port, loaded.sources["port"]) == (3, Source("cli", "--port"))
    assert loaded.settings.log_level == "error"
    assert loaded.sources["log_level"] == Source("env", "OMLX_LOG_LEVEL")
    assert loaded.settings.max_context == 5
    assert loaded.sources["max_context"] == Source("file", str(path))
    assert loaded.sources["host"] == Source("default")
    assert loaded.is_set("port") and not loaded.is_set("host")


def test_the_process_environment_is_never_read_behind_our_back(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMLX_PORT", "1234")

    assert Settings().port == load(home).settings.port == 8000


def test_every_setting_can_be_given_as_variable_flag_and_in_the_file(tmp_path: Path) -> None:
    values = {
        "host": "localhost",
        "port": "1",
        "allowed_hosts": "A.example:80, b",
        "cors_origins": "https://A.example/",
        "api_key": KEY,
        "admin_key": KEY,
        "model": "org/name",
        "model_dir": "/m",
        "model_aliases": "a=b, c=d",
        "memory_budget": "8gib",
        "cache_enabled": "Off",
        "hot_cache_max_size": "0",
        "ssd_cache_dir": "/c",
        "ssd_cache_max_size": "50%",
        "ssd_free_space_floor": "0",
        "ssd_write_policy": "Through",
        "ssd_pending_max_size": "AUTO",
        "paged_cache_block_size": "16",
        "initial_cache_blocks": "1",
        "max_cache_blocks": "9",
        "gdn_snapshot_storage": "embedded",
        "gdn_ssd_pending_max_size": "0",
        "gdn_sidecar_state_dtype": "bf16",
        "gdn_checkpoint_interval": "16",
        "max_concurrent_requests": "1",
        "max_queued_requests": "1",
        "prefill_step_tokens": "1",
        "decode_share": "0",
        "default_max_tokens": "1",
        "max_context": "1",
        "body_max_size": "1kB",
        "max_connections": "1",
        "drain_timeout_s": "0.5",
        "strip_attribution": "no",
        "strict_requests": "yes",
        "reasoning_field": "Both",
        "metrics_vllm_names": "yes",
        "log_level": "TRACE",
    }
    assert set(values) == set(NAMES)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    switches = {
        "cache_enabled": "--no-cache",
        "strip_attribution": "--no-strip-attribution",
        "strict_requests": "--strict-requests",
        "metrics_vllm_names": "--metrics-vllm-names",
    }
    argv = [
        word
        for name, value in values.items()
        for word in ([switches[name]] if name in switches else [flag(name), value])
    ]
    write(tmp_path, json.dumps(values))

    by_flag = load_settings(overrides(parser.parse_args(argv)), {}, tmp_path / "none")
    by_variable = load(tmp_path / "none", {env_name(name): values[name] for name in values})
    by_file = load(tmp_path)

    assert by_flag.settings == by_variable.settings == by_file.settings
    for loaded, kind in ((by_flag, "cli"), (by_variable, "env"), (by_file, "file")):
        assert {source.kind for source in loaded.sources.values()} == {kind}
    assert by_flag.sources["cache_enabled"].detail == "--no-cache"
    settings = by_file.settings
    assert settings.allowed_hosts == ("a.example", "b")
    assert settings.cors_origins == ("https://a.example",)
    assert settings.model_aliases == {"a": "b", "c": "d"}
    assert settings.memory_budget.resolve(0) == 8 * 2**30


def test_flags_that_are_not_given_override_nothing() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url")
    add_arguments(parser, ("port", "cache_enabled"))

    assert overrides(parser.parse_args(["--url", "u"])) == {}
    assert overrides(parser.parse_args(["--no-cache"])) == {"cache_enabled": False}
    assert overrides(parser.parse_args(["--cache-enabled"])) == {"cache_enabled": True}


def test_the_home_is_named_by_its_variable_or_lies_in_the_users_home() -> None:
    assert home_directory({"OMLX_HOME": "/data/omlx"}) == Path("/data/omlx")
    assert home_directory({"HOME": "/home/user"}) == Path("/home/user/.omlx")
    with pytest.raises(SettingsError, match="OMLX_HOME"):
        home_directory({"OMLX_HOME": " "})


# ── values ───────────────────────────────────────────────────────────────────────────────────


@given(st.sampled_from(["true", "1", "yes", "on"]), st.sampled_from([str.upper, str.title]))
def test_booleans_are_read_trimmed_and_in_any_case(word: str, case) -> None:
    opposite = {"true": "false", "1": "0", "yes": "no", "on": "off"}[word]
    home = Path("/nowhere")

    assert load(home, {"OMLX_CACHE_ENABLED": f" {case(word)} "}).settings.cache_enabled
    assert not load(home, {"OMLX_CACHE_ENABLED": case(opposite)}).settings.cache_enabled


@pytest.mark.parametrize("codec", [" INT8 ", "Rht_Int16", "fp32"])
def test_codec_names_are_read_trimmed_and_in_any_case(home: Path, codec: str) -> None:
    """B103"""
    loaded = load(home, {"OMLX_GDN_SIDECAR_STATE_DTYPE": codec})

    assert loaded.settings.gdn_sidecar_state_dtype == codec.strip().lower()


def test_an_unknown_codec_is_refused_naming_the_five(home: Path) -> None:
    message = refusal(home, gdn_sidecar_state_dtype="int4")

    for codec in ("fp32", "bf16", "int8", "rht_int8", "rht_int16"):
        assert codec in message


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("host", ""),
        ("host", "a\nb"),
        ("port", "-1"),
        ("port", "65536"),
        ("port", ""),
        ("port", "x"),
        ("allowed_hosts", "*"),
        ("allowed_hosts", "https://a"),
        ("cors_origins", "a.example"),
        ("cors_origins", "https://a.example/path"),
        ("model", " "),
        ("model_aliases", "a"),
        ("model_aliases", "a="),
        ("model_aliases", "a=b,a=c"),
        ("memory_budget", "0"),
        ("memory_budget", "101%"),
        ("cache_enabled", "2"),
        ("cache_enabled", ""),
        ("hot_cache_max_size", "-1"),
        ("hot_cache_max_size", "auto"),
        ("ssd_cache_dir", ""),
        ("ssd_cache_max_size", "1GBB"),
        ("ssd_write_policy", "never"),
        ("ssd_pending_max_size", "automatic"),
        ("paged_cache_block_size", "8"),
        ("paged_cache_block_size", "48"),
        ("paged_cache_block_size", "8192"),
        ("initial_cache_blocks", "0"),
        ("max_cache_blocks", "0"),
        ("gdn_snapshot_storage", "ram"),
        ("gdn_checkpoint_interval", "15"),
        ("gdn_checkpoint_interval", "65537"),
        ("max_concurrent_requests", "0"),
        ("max_concurrent_requests", "-1"),
        ("max_concurrent_requests", "x"),
        ("max_queued_requests", "0"),
        ("prefill_step_tokens", "0"),
        ("decode_share", "1"),
        ("decode_share", "-0.1"),
        ("decode_share", "nan"),
        ("default_max_tokens", "0"),
        ("max_context", "0"),
        ("body_max_size", "0"),
        ("body_max_size", "20%"),
        ("max_connections", "0"),
        ("drain_timeout_s", "-1"),
        ("drain_timeout_s", "inf"),
        ("log_level", "loud"),
    ],
)
def test_a_bad_value_is_refused_with_its_source_and_what_is_accepted(
    home: Path, name: str, bad: str
) -> None:
    """B89, B103"""
    accepted = constraints(name)["text"]

    for message, given_by in (
        (refusal(home, None, **{name: bad}), flag(name)),
        (refusal(home, {env_name(name): bad}), env_name(name)),
    ):
        assert message.startswith(given_by)
        assert accepted in message
    path = write(home, json.dumps({name: bad}))
    message = refusal(home)
    assert message.startswith(name)
    assert str(path) in message
    assert path.exists()


@pytest.mark.parametrize(
    ("name", "bad"),
    [("port", True), ("port", None), ("port", 1.5), ("model", 3), ("allowed_hosts", [1])],
)
def test_a_value_of_another_type_in_the_file_is_refused(home: Path, name: str, bad: object) -> None:
    write(home, json.dumps({name: bad}))

    assert refusal(home).startswith(name)


def test_every_bound_itself_is_accepted() -> None:
    for name in NAMES:
        limits = constraints(name)
        for bound in ("min", "max"):
            if bound in limits:
                Settings(**{name: limits[bound]})


def test_settings_do_not_change_and_know_no_other_names() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1
    with pytest.raises(ValidationError):
        Settings(prot=1)  # pyright: ignore[reportCallIssue]


# ── warnings ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("OMLX_SSD_CACHE_MAX_SIZEX", "OMLX_SSD_CACHE_MAX_SIZE"),
        ("OMLX_APIKEY", "OMLX_API_KEY"),
        ("omlx_port", "OMLX_PORT"),
        ("OMLX_HOMES", "OMLX_HOME"),
    ],
)
def test_an_unknown_variable_is_reported_with_what_may_be_meant(
    home: Path, variable: str, hint: str
) -> None:
    """B103"""
    (warning,) = load(home, {variable: KEY, "OMLX_HOME": str(home), "PATH": "x"}).warnings

    assert variable in warning
    assert f"did you mean {hint}?" in warning
    assert KEY not in warning


@pytest.mark.parametrize(
    ("idle", "because"),
    [
        (("hot_cache_max_size", "1GB"), ("cache_enabled", "false")),
        (("ssd_cache_max_size", "1GB"), ("cache_enabled", "false")),
        (("gdn_sidecar_state_dtype", "int8"), ("cache_enabled", "false")),
        (("ssd_cache_dir", "/c"), ("ssd_cache_max_size", "0")),
        (("ssd_pending_max_size", "1GB"), ("ssd_cache_max_size", "0%")),
        (("gdn_snapshot_storage", "ssd_sidecar"), ("ssd_cache_max_size", "0")),
        (("gdn_ssd_pending_max_size", "1GB"), ("gdn_snapshot_storage", "embedded")),
        (("initial_cache_blocks", "10"), ("max_cache_blocks", "5")),
    ],
)
def test_a_value_without_effect_is_reported_naming_both_variables(
    home: Path, idle: tuple[str, str], because: tuple[str, str]
) -> None:
    """B103"""
    (warning,) = load(home, {env_name(idle[0]): idle[1], env_name(because[0]): because[1]}).warnings

    assert env_name(idle[0]) in warning
    assert env_name(because[0]) in warning


def test_the_cause_named_is_the_one_that_would_have_to_change_first(home: Path) -> None:
    env = {"OMLX_SSD_CACHE_DIR": "/c", "OMLX_SSD_CACHE_MAX_SIZE": "0"}

    warnings = load(home, env, cache_enabled=False).warnings

    assert [warning.split(" has no effect ")[1] for warning in warnings] == [
        "because of --no-cache.",
        "because of --no-cache.",
    ]


def test_the_size_of_the_ssd_tier_alone_has_its_effect(home: Path) -> None:
    """B103"""
    loaded = load(home, {"OMLX_SSD_CACHE_MAX_SIZE": "1GB"})

    assert loaded.settings.ssd_cache_max_size == Size.parse("1GB")
    assert loaded.warnings == ()


# ── keys ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "server.example", "0", "127.1"])
def test_a_bind_that_others_can_reach_needs_an_api_key(home: Path, host: str) -> None:
    """B104"""
    message = refusal(home, {"OMLX_HOST": host})

    assert "OMLX_HOST" in message and "OMLX_API_KEY" in message
    assert "OMLX_API_KEY" in refusal(home, {"OMLX_HOST": host, "OMLX_ADMIN_KEY": KEY})
    assert load(home, {"OMLX_HOST": host, "OMLX_API_KEY": KEY}).settings.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"])
def test_a_loopback_bind_needs_none(home: Path, host: str) -> None:
    assert is_loopback(load(home, {"OMLX_HOST": host}).settings.host)


@pytest.mark.parametrize("key", ["", " ", "schl\u00fcssel-sk-123", "two words", "a\nb", "a\0b"])
@pytest.mark.parametrize("name", sorted(SECRETS))
def test_a_key_that_no_header_can_carry_is_refused_unquoted(
    home: Path, name: str, key: str
) -> None:
    message = refusal(home, {env_name(name): key})

    assert env_name(name) in message
    assert not key.strip() or key not in message


def test_a_short_key_is_accepted_with_a_warning(home: Path) -> None:
    (warning,) = load(home, api_key="hunter2").warnings

    assert "--api-key" in warning
    assert "hunter2" not in warning
    assert load(home, api_key="x" * 16).warnings == ()


def test_no_text_about_settings_holds_a_key(home: Path) -> None:
    """B38"""
    write(home, json.dumps({"admin_key": KEY + "2"}))
    loaded = load(home, {"OMLX_API_KEY": KEY})

    texts = [
        repr(loaded),
        str(loaded.settings),
        loaded.settings.model_dump_json(),
        repr(describe(loaded)),
        refusal(home, {"OMLX_API_KEY": KEY, "OMLX_PORT": "x"}),
        refusal(home, {"OMLX_API_KEY": KEY + "\u00e4"}),
        refusal(home, {"OMLX_API_KEY": KEY, "OMLX_SSD_CACHE_DIR": "/"}),
    ]

    assert not [text for text in texts if KEY in text]
    rows = {row.name: row.value for row in describe(loaded)}
    assert rows["api_key"] == rows["admin_key"] == "set"


# ── folders ──────────────────────────────────────────────────────────────────────────────────


def test_the_cache_is_never_the_volume_or_a_home(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home.mkdir()
    (tmp_path / "link").symlink_to(home)

    for folder in ("/", "//", "/tmp/..", "~", str(home), f"{home}/x/..", str(tmp_path / "link")):
        assert "OMLX_SSD_CACHE_DIR" in refusal(home, {"OMLX_SSD_CACHE_DIR": folder})
    assert load(home, ssd_cache_dir="~/c").settings.ssd_cache_dir == tmp_path / "c"


# ── the settings file ────────────────────────────────────────────────────────────────────────

GOOD = json.dumps({"api_key": KEY, "port": 9000})


@pytest.mark.parametrize(
    "broken",
    [
        GOOD[: len(GOOD) // 2],
        GOOD + '}conds": null}',
        "[]",
        "",
        "null",
        b"\xff\xfe\x00",
        "[" * 100_000,
        '{"port": ' + "9" * 5000 + "}",
    ],
)
def test_a_broken_file_is_set_aside_and_the_start_refused(home: Path, broken: str | bytes) -> None:
    """B37 a-c"""
    path = write(home, broken)
    path.chmod(0o644)

    message = refusal(home, {"OMLX_PORT": "1"})

    (aside,) = home.glob("settings.json.corrupt-*")
    assert str(aside) in message and str(path) in message
    assert KEY not in message
    assert not path.exists()
    assert aside.read_bytes() == (broken if isinstance(broken, bytes) else broken.encode())
    assert stat.S_IMODE(aside.stat().st_mode) == 0o600


def test_after_a_broken_file_no_start_is_open_until_somebody_acts(home: Path) -> None:
    """B37: a supervisor restarts at once, and then there is no file to find broken."""
    path = write(home, GOOD[:-1])
    refusal(home)
    (aside,) = home.glob("settings.json.corrupt-*")

    assert str(aside) in refusal(home)
    (warning,) = load(home, {"OMLX_API_KEY": KEY}).warnings
    assert str(aside) in warning
    aside.rename(path)
    path.write_text(GOOD)
    assert load(home).settings.port == 9000


def test_two_broken_files_are_both_kept(home: Path) -> None:
    for _ in range(3):
        write(home, "{")
        refusal(home)

    assert len(list(home.glob("settings.json.corrupt-*"))) == 3


def test_a_reader_that_only_looks_moves_nothing(home: Path) -> None:
    path = write(home, "{")

    with pytest.raises(SettingsError, match="Repair it"):
        load_settings({}, {}, home, set_aside=False)

    assert path.read_text() == "{"


def test_an_unknown_name_in_the_file_is_refused_with_what_may_be_meant(home: Path) -> None:
    path = write(home, '{"prot": 9000}')

    message = refusal(home)

    assert "'prot'" in message and "did you mean port?" in message and str(path) in message
    assert path.exists()


def test_a_file_that_cannot_be_read_is_refused(home: Path) -> None:
    (home / "settings.json").mkdir(parents=True)

    assert "cannot be read" in refusal(home)


def test_a_file_that_others_can_read_is_reported(home: Path) -> None:
    write(home, GOOD).chmod(0o644)

    (warning,) = load(home).warnings

    assert "chmod 600" in warning


def test_what_is_saved_is_loaded_again_and_nothing_else_is_written(home: Path) -> None:
    save_settings_file(home, {"api_key": KEY, "hot_cache_max_size": "1 gib"})
    save_settings_file(home, {"allowed_hosts": ["a", "b"], "model_aliases": {"a": "b"}})
    save_settings_file(home, {"hot_cache_max_size": None, "max_context": 77})

    path = home / "settings.json"
    assert json.loads(path.read_text()) == {
        "api_key": KEY,
        "allowed_hosts": ["a", "b"],
        "model_aliases": {"a": "b"},
        "max_context": 77,
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert load(home).settings.api_key == Settings(api_key=KEY).api_key  # pyright: ignore
    assert [file.name for file in home.iterdir()] == ["settings.json"]


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_save_that_fails_leaves_the_old_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """B37 d, e"""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    save_settings_file(home, {"port": 1})
    monkeypatch.setattr(os, step, full)

    with pytest.raises(OSError, match="No space"):
        save_settings_file(home, {"port": 2})

    assert load(home).settings.port == 1
    assert [file.name for file in home.iterdir()] == ["settings.json"]


def test_a_save_that_could_not_be_loaded_changes_nothing(home: Path) -> None:
    """K12: a value that was accepted starts again."""
    path = write(home, GOOD)

    for changes in ({"port": 1, "log_level": "loud"}, {"prot": 1}, {"api_key": "two words"}):
        with pytest.raises(SettingsError) as refused:
            save_settings_file(home, changes)
        assert refused.value.name in changes
        assert path.read_text() == GOOD

    path.write_text("{")
    with pytest.raises(SettingsError):
        save_settings_file(home, {"port": 1})
    assert path.read_text() == "{"


# ── changes while running ────────────────────────────────────────────────────────────────────


def test_a_change_holds_and_is_taken_back_with_none(home: Path) -> None:
    loaded = load(home, {"OMLX_API_KEY": KEY}, port="1")

    changed = loaded.changed({"max_context": 7, "hot_cache_max_size": "1GB"})
    back = changed.changed({"max_context": None})

    assert changed.settings.max_context == 7
    assert changed.sources["max_context"] == Source("file", str(home / "settings.json"))
    assert changed.settings.port == 1
    assert changed.settings.api_key == loaded.settings.api_key
    assert back.settings.max_context is None
    assert back.sources["max_context"] == Source("default")
    assert back.settings.hot_cache_max_size == Size.parse("1GB")
    assert loaded.settings.max_context is None


@pytest.mark.parametrize(
    ("changes", "name", "code"),
    [
        ({"port": 1}, "port", "locked"),
        ({"log_level": "info"}, "log_level", "locked"),
        ({"prot": 1}, "prot", "unknown_setting"),
        ({"max_context": 0}, "max_context", "invalid_value"),
        ({"host": "0.0.0.0"}, "host", "invalid_value"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_by_name(
    home: Path, changes: dict[str, object], name: str, code: str
) -> None:
    loaded = load(home, {"OMLX_LOG_LEVEL": "debug"}, port="1")

    with pytest.raises(SettingsError) as refused:
        loaded.changed({"max_connections": 5} | changes)

    assert (refused.value.name, refused.value.code) == (name, code)
    if code == "locked":
        assert loaded.sources[name].detail in str(refused.value)


def test_a_running_server_takes_over_what_it_can_and_reads_the_file_anew(home: Path) -> None:
    running = load(home, {"OMLX_LOG_LEVEL": "debug"}, port="1")
    save_settings_file(home, {"max_context": 7, "model": "other", "log_level": "error", "port": 2})

    stored = reread(running)
    in_force = running.taking_over(stored, ["max_context"])

    assert (stored.settings.max_context, stored.settings.model) == (7, "other")
    assert (stored.settings.log_level, stored.settings.port) == ("debug", 1)
    assert stored.sources["log_level"] == Source("env", "OMLX_LOG_LEVEL")
    assert (in_force.settings.max_context, in_force.settings.model) == (7, "demo")
    assert in_force.sources["max_context"] == Source("file", str(home / "settings.json"))
    assert in_force.sources["model"] == Source("default")
    assert reread(in_force).settings == stored.settings


# ── what people read ─────────────────────────────────────────────────────────────────────────


def test_every_setting_explains_itself() -> None:
    schema = Settings.model_json_schema()["properties"]
    for name in NAMES:
        assert schema[name]["description"].endswith(".")
        assert schema[name]["apply"] in {"live", "next_request", "reload", "restart"}
        assert constraints(name)["text"]


def test_the_table_and_the_help_hold_every_setting() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = parser.format_help().split()

    assert not [name for name in NAMES if f"| `{name}` |" not in settings_table()]
    assert not [name for name in NAMES if not {flag(name), flag(name) + ","} & set(words)]
    assert "| `ssd_cache_dir` | $OMLX_HOME/cache |" in settings_table()
    assert "rht_int16" in settings_table()


def test_the_readme_has_the_table_as_it_is() -> None:
    assert settings_table() in README.read_text("utf-8")


def test_a_description_has_a_row_per_setting_with_value_and_source(home: Path) -> None:
    rows = {row.name: row for row in describe(load(home, {"OMLX_PORT": "1"}, cache_enabled=False))}

    assert tuple(rows) == NAMES
    assert rows["port"] == ("port", "1", "8000", "env OMLX_PORT", "restart", "")
    assert rows["cache_enabled"].value == "false"
    assert rows["cache_enabled"].source == "cli --no-cache"
    assert rows["max_context"].value == "the model's"
    assert rows["hot_cache_max_size"].value == rows["hot_cache_max_size"].default == "20%"
    assert rows["api_key"].value is None
