"""stepscope calibrate as a user meets it: real ranks, one answer, clear errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from stepscope.records.folders import node_name
from stepscope.records.hardware import Profile
from stepscope.text.figures import binary_size, byte_rate, flop_rate
from stepscope.trace.machine_profiles import load_profiles
from stepscope.ui.html.calibration import write_calibration
from stepscope.ui.terminal.measurements import print_calibration
from stepscope.ui.topics.measurements import (
    calibration_answer,
    calibration_json,
    collective_rows,
    contention_sentence,
    fit_profile,
)

KINDS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"]
SIZES = [1024, 4096, 16384, 65536]
SHORT = ["calibrate", "--quick", "--max-bytes", "64KiB", "--seconds", "0.2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def call(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    ours = {"STEPSCOPE_PROFILES": str(folder / "profiles"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **ours, **environment},
        timeout=120,
    )


def raw_sweep(kind: str, alpha_ns: float, ns_per_byte: float) -> dict[str, Any]:
    times = [[alpha_ns + ns_per_byte * n] * 3 for n in SIZES]
    return {
        "kind": kind, "group": "world", "group_size": 2, "sizes_bytes": SIZES,
        "passes_ns": [times] * 4, "left_out_bytes": [],
    }  # fmt: skip


@pytest.fixture
def raw() -> dict[str, Any]:
    def one(value: float) -> dict[str, float]:
        return {"value": value, "spread": 0.02}

    return {
        "schema": 1, "host": node_name(), "device": "NVIDIA H200", "kind": "cuda",
        "torch": "2.11.0", "when_unix": 1e9, "world_size": 2, "backend": "nccl",
        "machine": {
            "threads": 16,
            "matmul_flops": {"bf16": {"flops": 7.9e14, "spread": 0.01, "side": 8192}},
            "not_offered": {"fp8": "not on this device"},
            "copy_bytes_s": one(4.3e12), "host_to_device_bytes_s": one(5.5e10),
            "device_to_host_bytes_s": one(5.5e10), "launch_ns": one(4400.0),
            "launch_gap_ns": one(1300.0), "tiny_op_ns": one(9000.0),
        },
        "sweeps": [raw_sweep("all_reduce", 20_000, 0.5), raw_sweep("broadcast", 10_000, 0.25)],
        "not_offered": [
            {"kind": "all_to_all", "group": "world", "backend": "nccl", "why": "no such thing"}
        ],
    }  # fmt: skip


@pytest.fixture
def profile(raw: dict[str, Any]) -> Profile:
    return fit_profile(raw)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One real job of two gloo ranks under a launcher."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("launched")
    report = folder / "calibration.html"
    words = [*TORCHRUN, "-m", "stepscope", *SHORT, "--json", "--html", str(report)]
    done = call(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    return {"done": done, "folder": folder, "report": report}


def test_two_ranks_under_a_launcher_give_one_answer(launched: dict[str, Any]) -> None:
    body = json.loads(launched["done"].stdout)  # one object, so the other rank was silent
    assert body["schema"] == 1
    assert body["profile"]["world_size"] == 2
    assert body["profile"]["backend"] == "gloo"
    offered = [row["kind"] for row in body["collectives"]]
    refused = [name.split(",")[0] for name in body["profile"]["not_offered"]]
    assert sorted(offered + [k for k in refused if k in KINDS]) == sorted(KINDS)
    for fit in body["profile"]["fits"]:
        assert [one["size_bytes"] for one in fit["measured"]] == SIZES
        assert fit["passes"] >= 4
        assert all(segment["alpha_ns"] >= 0 for segment in fit["segments"])
    assert body["profile"]["matmul_flops"]["fp32"] > 0


def test_json_has_exactly_these_names(launched: dict[str, Any]) -> None:
    body = json.loads(launched["done"].stdout)
    assert list(body) == ["schema", "verdict", "why", "next", "saved", "profile", "collectives"]
    assert set(body["collectives"][0]) == {
        "kind", "group", "group_size", "from_bytes", "to_bytes", "latency_ns", "algbw_gb_s",
        "busbw_gb_s", "segments", "passes", "held_out", "held_out_sizes", "noise",
    }  # fmt: skip


def test_the_profile_is_saved_and_found(
    launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_PROFILES", str(launched["folder"] / "profiles"))
    (saved,) = load_profiles(node_name())
    body = json.loads(launched["done"].stdout)
    assert Path(body["saved"]).parent == launched["folder"] / "profiles"
    assert saved.when_unix == body["profile"]["when_unix"]
    assert saved.fit_for("all_reduce", 2) is not None
    assert saved.fit_for("all_reduce", 4) is None


def test_the_report_is_one_file_without_a_network(launched: dict[str, Any]) -> None:
    page = launched["report"].read_text()
    assert page.count("<svg viewBox") == len(json.loads(launched["done"].stdout)["collectives"])
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page


def test_algorithms_are_compared_on_the_saved_profile(launched: dict[str, Any]) -> None:
    words = ["-m", "stepscope", "calibrate", "--compare", "25MB", "--world", "8"]
    shown = call(*words, folder=launched["folder"])
    assert shown.returncode == 0, shown.stderr
    first = [line.split()[0] for line in shown.stdout.splitlines() if line.strip()]
    assert first[0] == "verdict"
    body = json.loads(call(*words, "--json", folder=launched["folder"]).stdout)
    assert body["comparison"]["size_bytes"] == 25_000_000
    assert body["comparison"]["ranks"] == 8
    assert set(body["comparison"]["times_ns"]) == {"ring", "tree", "halving_doubling"}
    assert body["measured"]["world_size"] == 2


def test_alone_it_measures_the_machine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = call("-m", "stepscope", *SHORT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert lines[1] == "verdict"
    assert "next" in lines
    assert "collectives, GB/s" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--world", "4"], 2, "--compare"),
        (["--max-bytes", "many"], 2, "--max-bytes 'many': write 8GB"),
        (["--max-bytes", "1KiB"], 2, "at least 4KiB"),
        (["--ranks", "1"], 2, "ranks"),
        (["--backend", "gloo"], 2, "needs ranks"),
        (["--html", "no/such/folder/x.html"], 2, "does not exist"),
        (["--compare", "1MB"], 4, "calibrate --ranks 2"),
        (["--compare", "1MB", "--world", "1"], 2, "world"),
    ],
)
def test_wrong_use_is_said_before_anything_is_measured(
    tmp_path: Path, words: list[str], code: int, says: str
) -> None:
    done = call("-m", "stepscope", "calibrate", *words, folder=tmp_path)
    assert done.returncode == code
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_ranks_inside_a_launcher_are_wrong_use(tmp_path: Path) -> None:
    done = call(
        "-m", "stepscope", "calibrate", "--ranks", "2", folder=tmp_path, RANK="0", WORLD_SIZE="2"
    )
    assert done.returncode == 2
    assert "launcher" in done.stderr


@pytest.mark.slow
def test_a_failing_rank_says_why(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = ["--ranks", "2", "--backend", "no-such-backend"]
    done = call("-m", "stepscope", *SHORT, *words, folder=tmp_path)
    assert done.returncode == 2
    assert "rank " in done.stderr
    assert "no-such-backend" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_broken_profile_is_exit_3(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/broken.json").write_text("{")
    done = call("-m", "stepscope", "calibrate", "--compare", "1MB", folder=tmp_path)
    assert done.returncode == 3
    assert "broken.json" in done.stderr


def test_raw_times_become_a_profile(profile: Profile) -> None:
    assert profile.matmul_flops == {"bf16": 7.9e14}
    assert (profile.launch_ns, profile.launch_gap_ns, profile.tiny_op_ns) == (4400, 1300, 9000)
    assert profile.spread["copy_bytes_s"] == 0.02
    assert profile.not_offered == {
        "fp8": "not on this device", "all_to_all, world": "no such thing"
    }  # fmt: skip
    fit = profile.fit_for("all_reduce", 2)
    assert fit is not None
    assert fit.expected_ns(1 << 20) == pytest.approx(20_000 + (1 << 19))


def test_rates_are_those_of_the_largest_size(profile: Profile) -> None:
    first, second = collective_rows(profile)
    assert first.algbw_gb_s == pytest.approx(65536 / (20_000 + 32_768))
    assert first.busbw_gb_s == pytest.approx(first.algbw_gb_s)  # 2(n-1)/n is 1 for two ranks
    assert (second.from_bytes, second.to_bytes) == (1024, 65536)


def test_words_name_the_device_and_the_collective(profile: Profile, tmp_path: Path) -> None:
    words = calibration_answer(profile)
    assert words.verdict.startswith("NVIDIA H200: 790 TFLOP/s in bf16 matmuls, 4.30 TB/s copied")
    assert "nccl" in words.verdict
    assert calibration_json(profile, tmp_path)["verdict"] == words.verdict


@pytest.fixture
def beside(raw: dict[str, Any]) -> Profile:
    """Alone 20 us + 0.5 ns a byte; compute of 1 ms takes half of that longer beside it."""
    rows = []
    for size_bytes in (16384, 65536):
        alone = 20_000 + 0.5 * size_bytes
        rows.append(
            {"size_bytes": size_bytes, "alone_ns": alone, "compute_ns": 1e6,
             "slowed_ns": 1e6 + alone / 2, "lasts_ns": 2 * alone}
        )  # fmt: skip
    return fit_profile(raw | {"contention": rows})


def test_what_an_all_reduce_takes_from_compute_is_said(
    beside: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = contention_sentence(beside)
    assert told == (
        "while an all_reduce over 2 ranks runs, compute slows down. It loses 50% of the time that "
        "the all_reduce takes alone. An all_reduce of 64 KiB then takes 106 µs instead of 52.8 µs"
    )
    print_calibration(beside, saved=Path("p.json"), width=200)
    assert f"overlap  {told}" in capsys.readouterr().out
    write_calibration(beside, tmp_path / "page.html")
    assert "loses 50% of the time" in (tmp_path / "page.html").read_text()
    assert calibration_json(beside, tmp_path)["profile"]["contention"]["lost"] == pytest.approx(0.5)


def test_where_it_was_not_measured_nothing_is_said(
    profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    assert contention_sentence(profile) is None
    print_calibration(profile, saved=Path("p.json"))
    assert "overlap" not in capsys.readouterr().out


def test_sizes_that_the_sweep_did_not_reach_are_not_compared(raw: dict[str, Any]) -> None:
    row = {"alone_ns": 1e6, "compute_ns": 1e6, "slowed_ns": 1.25e6, "lasts_ns": 2e6}
    rows = [{"size_bytes": 1 << 20, **row}, {"size_bytes": 4 << 20, **row}]
    told = contention_sentence(fit_profile(raw | {"contention": rows}))
    assert told is not None
    assert told.endswith("loses 25% of the time that the all_reduce takes alone")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(
    profile: Profile, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    print_calibration(profile, saved=Path("p.json"), width=width)
    shown = capsys.readouterr().out
    assert "nccl does not offer it" in shown
    assert "NVIDIA H200 does not offer it" in shown
    for line in shown.splitlines():
        cells = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)
        assert cells <= width, line


def test_units() -> None:
    assert flop_rate(7.9e14) == "790 TFLOP/s"
    assert byte_rate(9e8) == "900 MB/s"
    assert binary_size(1024) == "1 KiB"
    assert binary_size(256 << 20) == "256 MiB"
    assert binary_size(100) == "100 B"
