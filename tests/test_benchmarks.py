"""The benchmarks of the SSD tier: what they conclude, and that they run. Never how fast it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))  # as for a script

from scripts import bench_client, bench_offload, bench_store
from scripts.bars import bars_svg
from scripts.bench_client import Value, named, share_meanwhile
from scripts.bench_store import Round, TooShort, rate_together
from scripts.chats import Documents, Reading
from scripts.offload_verdict import CONTROLS, GAINS, Pair, Result, overall
from scripts.servers import free_port
from tests.tiny import LOOP

ModelPath = Callable[[str], Path]
PROMPT = 100


def reading(ttft_ms: float, ram: int = 0, ssd: int = 0) -> Reading:
    return Reading(
        5.0,
        (5.0 + ttft_ms / 1000,),
        "text",
        PROMPT,
        ram + ssd,
        1,
        {"cached_from": {"ram": ram, "ssd": ssd}},
    )


def control(workload: str, *ratios: float) -> Result:
    """As it should be, but for the ratios."""
    ram = 99 if workload == "reuse-fits" else 3
    return Result(workload, [Pair(reading(100, ram), reading(100 * r, ram)) for r in ratios])


def gain(workload: str, *ratios: float) -> Result:
    return Result(workload, [Pair(reading(100), reading(100 * r, ssd=99)) for r in ratios])


# ── what is concluded ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("workload", CONTROLS)
@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(0.96, "suspect"), (0.98, "as wanted"), (1.02, "as wanted"), (1.04, "suspect")],
)
def test_a_control_that_shows_a_difference_is_suspect_in_either_direction(
    workload: str, ratio: float, verdict: str
) -> None:
    assert control(workload, ratio).verdict == verdict


@pytest.mark.parametrize("workload", GAINS)
@pytest.mark.parametrize(("ratio", "verdict"), [(0.09, "as wanted"), (0.11, "missed")])
def test_a_revisit_may_take_a_tenth_of_computing_it(
    workload: str, ratio: float, verdict: str
) -> None:
    assert gain(workload, ratio).verdict == verdict


def test_a_ratio_is_the_median_of_pairs_so_that_drift_is_in_neither_side() -> None:
    slower = [
        Pair(reading(speed), reading(0.05 * speed, ssd=99)) for speed in (100.0, 200.0, 400.0)
    ]

    assert Result("restart", slower).ratio == pytest.approx(0.05)
    assert gain("restart", 0.02, 0.5, 0.04).ratio == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("workload", "off", "on"),
    [
        ("no-reuse", reading(100), reading(100, ram=50)),
        ("no-reuse", reading(100, ram=50), reading(100)),
        ("reuse-fits", reading(100, ram=99), reading(100, ssd=99)),
        ("reuse-fits", reading(100, ram=3), reading(100, ram=99)),
        ("spill-revisit", reading(100, ram=99), reading(5, ssd=99)),
        ("spill-revisit", reading(100), reading(5, ram=99)),
        ("restart", reading(100), reading(5, ram=99)),
        ("restart", reading(100), reading(5, ssd=50)),
    ],
)
def test_a_workload_whose_answers_came_from_elsewhere_is_suspect_whatever_its_ratio(
    workload: str, off: Reading, on: Reading
) -> None:
    result = Result(workload, [Pair(off, on)])

    assert result.mistake is not None
    assert result.verdict == "suspect"


def test_what_was_measured_on_a_busy_machine_is_suspect() -> None:
    calm, busy = (Pair(reading(100), reading(100), others) for others in (0.05, 0.5))
    rounds = [Round(100.0, 100.0, 100.0, 1, others) for others in (0.05, 0.5)]

    assert Result("no-reuse", [calm, calm, busy]).verdict == "as wanted"
    assert Result("no-reuse", [calm, busy, busy]).verdict == "suspect"
    assert bench_store.Result("decode", 1, rounds[:1]).verdict == "as wanted"
    assert bench_store.Result("decode", 1, rounds[1:]).verdict == "suspect"


def test_one_suspect_workload_makes_the_run_suspect_and_one_miss_makes_it_a_miss() -> None:
    good, bad = control("no-reuse", 1.0), control("reuse-fits", 0.5)
    reached, missed = gain("restart", 0.05), gain("spill-revisit", 0.5)

    assert overall([good, reached]) == "as wanted"
    assert overall([good, reached, missed]) == "missed"
    assert overall([good, bad, missed]) == "suspect"


@pytest.mark.parametrize(
    ("on", "again", "written", "verdict"),
    [
        (98.0, 100.0, 1, "as wanted"),
        (96.0, 100.0, 1, "missed"),
        (105.0, 100.0, 1, "as wanted"),
        (98.0, 90.0, 1, "suspect"),
        (98.0, 110.0, 1, "suspect"),
        (98.0, 100.0, 0, "suspect"),
    ],
)
def test_storing_may_cost_three_percent_on_a_quiet_machine_and_must_have_happened(
    on: float, again: float, written: int, verdict: str
) -> None:
    rounds = [Round(100.0, on, again, written)]

    assert bench_store.Result("decode", 1, rounds).verdict == verdict


def test_a_rate_counts_only_while_all_streams_run() -> None:
    def stream(start: float, stop: float) -> Reading:
        pieces = tuple(start + 0.125 * n for n in range(int(8 * (stop - start)) + 1))
        return Reading(0.0, pieces, "", PROMPT, 0, len(pieces))

    together = rate_together([stream(0.0, 10.0), stream(4.0, 12.0)])

    assert together == pytest.approx(16.0)
    with pytest.raises(TooShort):
        rate_together([stream(0.0, 5.0), stream(4.5, 12.0)])


def test_documents_are_the_same_each_time_and_differ_from_the_first_word_on() -> None:
    drawn, again = Documents(3), Documents(3)
    texts = [drawn.draw(60)[0]["content"] for _ in range(20)]

    assert texts == [again.draw(60)[0]["content"] for _ in range(20)]
    assert len({text.split()[0] for text in texts}) == len(texts)


# ── what the client concludes ────────────────────────────────────────────────────────────────


def test_the_share_of_a_running_answer_is_what_its_tokens_take_alone() -> None:
    before = [n / 16 for n in range(17)]  # 16 a second until 1.0
    disturbed = [*before, *(1.0 + n / 4 for n in range(1, 17))]  # 4 a second until 5.0
    alone = [n / 16 for n in range(33)]
    slower = [*before, *(1.0 + n / 8 for n in range(1, 17))]  # late tokens take longer anyway

    assert share_meanwhile(disturbed, alone, 1.0, 4.0) == pytest.approx(0.25)
    assert share_meanwhile(disturbed, alone, 1.0, 9.0) == pytest.approx(0.25)
    assert share_meanwhile(disturbed, slower, 1.0, 4.0) == pytest.approx(0.5)
    for arrivals, by_itself, start in ((before, alone, 0.5), (before, alone, 1.0)):
        with pytest.raises(bench_client.TooShort, match="before it was disturbed"):
            share_meanwhile(arrivals, by_itself, start, 3.0)
    with pytest.raises(bench_client.TooShort, match="shorter"):
        share_meanwhile(disturbed, before, 1.0, 4.0)


def test_a_server_option_names_its_server_and_may_hold_any_sign_behind_the_first() -> None:
    assert named(["a=http://x:1/?k=v", "b=y"]) == {"a": "http://x:1/?k=v", "b": "y"}
    for wrong in ("http://x", "=x", "a="):
        with pytest.raises(SystemExit, match="not NAME=VALUE"):
            named([wrong])


def report(*rows: dict[str, Any], failures: tuple[dict[str, str], ...] = ()) -> dict[str, Any]:
    return {"servers": {"a": "", "b <": ""}, "results": list(rows), "failures": list(failures)}


def test_a_table_has_a_cell_for_each_server_and_says_why_one_is_empty() -> None:
    values = [Value("first token", "ms", ms, cached) for ms, cached in ((10.0, 5), (30.0, 7))]
    told = bench_client.result("repeat", "first token", "ms", "a", values)
    untold = bench_client.result("cold", "first token", "ms", "b <", [Value("", "", 9.0)])
    failures = (
        {"workload": "repeat", "server": "b <", "reason": "500 no"},
        {"workload": "restart", "server": "a", "reason": "not started here"},
    )

    lines = bench_client.table(report(told, untold, failures=failures)).splitlines()

    assert lines[2] == "| repeat | first token | ms | 20.0 (6) | none: 500 no |"
    assert lines[3] == "| cold | first token | ms | none: ? | 9.00 |"
    assert lines[4] == "| restart | none: not started here | | | |"


def test_bars_are_as_long_as_their_values_are_and_names_do_no_harm() -> None:
    rows = [
        bench_client.result("cold", "first token", "ms", name, [Value("", "", value)])
        for name, value in (("a", 50.0), ("b <", 200.0))
    ]

    drawn = bars_svg(rows, ["a", "b <"])

    picture = ElementTree.fromstring(drawn)
    bars = [rect.get("width") for rect in picture.iter() if rect.get("height") == "12"]
    assert bars == ["105.0", "420.0"]
    assert "b &lt;" in drawn


# ── that they run ────────────────────────────────────────────────────────────────────────────


ENDLESS = json.dumps({"chat_template_kwargs": {"opening": LOOP[0]}})
"""What makes the tape model say three words over and over."""


def run(script: Any, model: Path, json_file: Path, *options: str) -> tuple[int, dict[str, Any]]:
    common = ("--model", str(model), "--quick", "--block-size", "16", "--ssd", "100MB")
    code = script.main([*common, "--fields", ENDLESS, "--json", str(json_file), *options])
    return code, json.loads(json_file.read_text())


@pytest.mark.slow
def test_the_workloads_of_the_tier_run_and_reuse_what_they_should(
    model_path: ModelPath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run(bench_offload, model_path("tape"), tmp_path / "out.json")

    rows = {row["workload"]: row for row in report["workloads"]}
    printed = capsys.readouterr().out
    assert list(rows) == [*CONTROLS, *GAINS]
    for workload, row in rows.items():
        assert row["mistake"] in (None, "the machine was busy with other things")
        assert row["others"] >= 0
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        assert row["off_ms"] > 0 and row["on_ms"] > 0
        assert (row["from_ssd"] > 0) == (workload in GAINS)
        assert row["ssd_limit_bytes"] == 100_000_000
        assert f"| {workload} |" in printed
    assert report["sizes"]["document_bytes"] > 0
    assert rows["spill-revisit"]["hot_limit_bytes"] < 2 * report["sizes"]["document_bytes"]
    assert "mlx" in report["facts"]["versions"]
    assert any("BLAS" in line for line in report["server"])
    assert f"This run is {report['verdict']}." in printed
    assert code == (0 if report["verdict"] == "as wanted" else 1)


@pytest.mark.slow
def test_the_cost_of_storing_is_measured_while_something_is_stored(
    model_path: ModelPath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--streams", "2", "--tokens", "400")

    code, report = run(bench_store, model_path("tape"), tmp_path / "out.json", *sizes)

    rows = report["results"]
    assert [(row["workload"], row["streams"]) for row in rows] == [
        ("decode", 2),
        ("no-reuse", 2),
    ]
    for row in rows:
        assert row["written_bytes"] > 0
        assert row["off"] > 0 and row["on"] > 0
        assert row["noise_min"] <= row["noise"] <= row["noise_max"]
    assert code == (0 if all(row["verdict"] == "as wanted" for row in rows) else 1)
    assert capsys.readouterr().out.count("| decode | 2 |") == 1


@pytest.mark.slow
def test_the_client_measures_a_server_that_it_starts_and_restarts(
    model_path: ModelPath,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMLX_HOME", str(tmp_path / "home"))
    port = free_port()
    serve = f"{sys.executable} -m omlx serve --port {port} --model {model_path('tape')}"
    out = [tmp_path / name for name in ("out.json", "out.md", "out.svg")]

    code = bench_client.main(
        [
            *("--server", f"ours=http://127.0.0.1:{port}"),
            *("--start", f"ours={serve} --paged-cache-block-size 16"),
            *("--rounds", "1", "--tokens", "160", "--streams", "2", "--between", "1"),
            *("--answer", "300", "--fields", ENDLESS),
            *("--json", str(out[0]), "--markdown", str(out[1]), "--svg", str(out[2])),
        ]
    )

    found = json.loads(out[0].read_text())
    rows = {(row["workload"], row["metric"]): row for row in found["results"]}
    assert code == 0
    assert found["failures"] == []
    assert {workload for workload, _ in rows} == set(bench_client.WORKLOADS)
    assert all(row["median"] > 0 for row in rows.values())
    assert all(row["unit"] and row["server"] == "ours" for row in rows.values())
    reused = {workload: row["cached"] for (workload, _), row in rows.items()}
    for workload in ("repeat", "extend", "branch", "evict-revisit", "restart"):
        assert reused[workload] > 100
    assert reused["cold"] < 100
    assert out[1].read_text() in capsys.readouterr().out
    assert ElementTree.parse(out[2]).getroot().tag.endswith("svg")
