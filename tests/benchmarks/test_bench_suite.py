"""What the suite's benchmarks make of results: promises, observations, what is measured again."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="the benchmarks train")

import bench_promises
import device_room
import each_workload
from bench_observations import OBSERVATIONS, Case, verdict
from bench_table import missing_ways, print_rows, read_rows
from promise_outcomes import Outcome, outcomes, print_results, summary
from record_models import way_of

if TYPE_CHECKING:
    from collections.abc import Callable


def outcome(**changes: Any) -> Outcome:
    known: dict[str, Any] = {
        "name": "gpt2",
        "label": "bf16",
        "base_ms": 100.0,
        "captured_ms": 102.0,
        "promised_ms": 50.0,
        "low_ms": 45.0,
        "high_ms": 55.0,
        "ms": 52.0,
        "promised_peak_bytes": 990,
        "peak_bytes": 1000,
    }
    return Outcome(**known | changes)


def test_a_promise_is_held_against_the_measured_step() -> None:
    kept = outcome()
    assert kept.error == pytest.approx(50 / 52 - 1)
    assert kept.is_inside
    assert not kept.has_wrong_sign
    assert kept.peak_error == pytest.approx(-0.01)
    assert not outcome(ms=56.0).is_inside
    assert outcome(peak_bytes=None).peak_error is None


@pytest.mark.parametrize(
    ("ms", "promised_ms", "wrong"),
    [(106.0, 95.0, True), (104.0, 95.0, False), (94.0, 103.0, True), (94.0, 99.0, False)],
)
def test_a_sign_is_wrong_only_where_the_change_is_clear(
    ms: float, promised_ms: float, wrong: bool
) -> None:
    assert outcome(ms=ms, promised_ms=promised_ms).has_wrong_sign is wrong


def test_the_summary_names_wrong_signs_and_has_a_line_for_each_change() -> None:
    lines = list(summary([outcome(), outcome(label="fused", name="moe", ms=106.0)]))
    assert [line.partition(":")[0] for line in lines[:3]] == ["all", "bf16", "fused"]
    assert any("wrong in 1 of 2 changes above 5%: moe fused" in line for line in lines)


RESULT = {
    "base": {"ms": 100.0, "peak_bytes": 1000},
    "captured_ms": 101.0,
    "explained_peak_bytes": 1010,
    "promised_peak_bytes": 950,
    "flops": {"explained": 100, "torch": 100.0},
    "changes": {
        "tf32": {"promised_ms": None, "refused": "no accelerator", "low_ms": 0, "high_ms": 0},
        "fused": {
            "promised_ms": 90.0,
            "low_ms": 80.0,
            "high_ms": 100.0,
            "promised_peak_bytes": None,
            "refused": None,
            "ms": 95.0,
            "peak_bytes": 1000,
        },
    },
}


def test_only_what_was_measured_is_an_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    assert [one.label for one in outcomes({"gpt2": RESULT})] == ["fused"]
    print_results({"gpt2": RESULT})
    printed = capsys.readouterr().out
    assert "| gpt2 | fused | 100.00 | 90.00 (80.00 to 100.00) | 95.00 | -5.3% | - |" in printed
    assert "gpt2, tf32: not measured: no accelerator" in printed
    assert "known before the run against the allocator's: 0 of 1 within 3%" in printed
    peaks = "950 B (-5.0%) | 1.01 kB (+1.0%) | 1.00 kB |"
    assert f"| gpt2 | 101.00 ms | 100.00 ms | +1.0% | +0.0% | {peaks}" in printed
    assert "captured steps against measured ones: 1 of 1 within 5%" in printed


def row(name: str, **fields: Any) -> dict[str, Any]:
    known = {"name": name, "size": "small", "step_ms": 10.0, "samples_per_s": 800.0}
    memory = {"activations": 700, "parameters": 300}
    return {**known, "busy": 0.5, "mfu": 0.1, "peak_bytes": 1000, "memory": memory, **fields}


def test_rows_have_their_speed_beside_fp32s(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"name": "gpt2", "size": "small", "status": "failed", "why": "it raised"}
    ways = {"fp32": row("gpt2"), "bf16": row("gpt2", step_ms=5.0), "tf32": failed}
    print_rows(read_rows({"gpt2": {"ways": ways}}))
    printed = capsys.readouterr().out
    assert "(2.00x) | 5.00 ms | 10% | 50% | 1.00 kB | 70% | 30% |" in printed
    assert "gpt2 in tf32 was not measured: it raised" in printed


def observed(says: str, rows: dict[str, dict[str, Any]], promises: dict[str, Any]) -> list[Case]:
    observation = next(one for one in OBSERVATIONS if says in one.says)
    results = {name: {"ways": {"fp32": row}} for name, row in rows.items()}
    return list(observation.cases(read_rows(results), promises))


def test_observations_hold_where_the_numbers_say_so() -> None:
    rows = {"nmt-lstm": row("nmt-lstm"), "wavenet": row("wavenet", busy=0.9)}
    assert [case.holds for case in observed("busy", rows, {})] == [True]
    assert [case.holds for case in observed("convolutional nets (", rows, {})] == [True]
    rows["nmt-lstm"] = row("nmt-lstm", busy=0.95, memory={"activations": 1, "parameters": 9})
    assert [case.holds for case in observed("busy", rows, {})] == [False]
    assert [case.holds for case in observed("recurrent nets.", rows, {})] == [False]
    twice = {"base": {"ms": 10.0}, "changes": {"batch x2": {"ms": 19.0}}}
    assert [case.holds for case in observed("saturates", rows, {"nmt-lstm": twice})] == [True]
    assert observed("saturates", rows, {}) == []


def test_an_observation_that_nothing_shows_is_not_said_to_hold() -> None:
    assert verdict([]).startswith("Not checked")
    holds, fails = Case(name="a", holds=True, because=""), Case(name="b", holds=False, because="")
    assert verdict([holds]) == "Holds in all 1."
    assert verdict([fails]) == "No longer holds in any of 1."
    assert verdict([holds, fails]) == "Holds in 1 of 2."


def test_workloads_with_a_whole_result_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each_workload.save(tmp_path, "gpt2", {"finished": True})
    each_workload.save(tmp_path, "moe", {"finished": False})
    begun: list[str] = []
    monkeypatch.setattr(each_workload, "_start", lambda name, *_: begun.append(name))
    parser = each_workload.options_for("", "x")
    options = ["gpt2", "moe", "nmt-lstm", "--out", str(tmp_path), "--turns", str(tmp_path / "t")]
    assert each_workload.run_each(parser.parse_args(options), one_never_runs)
    assert begun == ["moe", "nmt-lstm"]


def one_never_runs(name: str, options: argparse.Namespace) -> None:
    raise AssertionError(name)


def test_words_of_a_recorded_configuration() -> None:
    way = way_of("bf16-fused-x2")
    assert (way.remedies, way.batches) == (("bf16", "fused-optimizer"), 2)
    assert way_of("loop").optimizer == {"foreach": False}
    assert way_of("graph").graph
    with pytest.raises(ValueError, match="there is no fp33"):
        way_of("fp33")


def test_a_larger_batch_keeps_the_data() -> None:
    from forked_training import larger_batch

    assert larger_batch({"batch": 64, "batches": 4, "lr": 1}, 2) == {"batch": 128, "batches": 2}
    assert larger_batch({"batch": 64, "batches": 1}, 2) == {"batch": 128, "batches": 1}
    assert larger_batch({"batch": 16, "moves": 4}, 2) == {"batch": 32}


def test_a_table_is_completed_with_the_ways_that_it_lacks() -> None:
    known = {"fp32": {"why": None}, "tf32": {"why": "AcceleratorError: CUDA error: out of memory"}}
    assert missing_ways(["fp32", "tf32", "bf16"], known) == ["tf32", "bf16"]
    assert missing_ways(["fp32"], known) == []


def test_a_workload_is_given_again_where_memory_was_short() -> None:
    short = {"changes": {"bf16": {"failure": "AcceleratorError: CUDA error: out of memory"}}}
    assert bench_promises._short_of_memory(short)
    assert not bench_promises._short_of_memory({"changes": {"bf16": {"failure": None}}})


def test_a_claim_is_for_the_base_and_the_changes_trained_beside_it() -> None:
    result = {
        "changes": {
            "tf32": {"promised_peak_bytes": None},
            "bf16": {"promised_peak_bytes": 70},
            "fused": {"promised_peak_bytes": 100},
            "batch x2": {"promised_peak_bytes": 190},
        }
    }
    labels = list(result["changes"])
    most = bench_promises._most_needed(labels, result, 100)
    assert most == device_room.needed([100, 100, 190])
    assert bench_promises._most_needed([], result, 100) == device_room.needed([100])


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_workload_past_its_limit_leaves_no_training_behind(tmp_path: Path) -> None:
    """Not even one that was stopped while another workload was timed."""
    script = tmp_path / "trains.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "Path(sys.argv[1]).write_text(str(child))\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, script, tmp_path / "pid"])
    wait_until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
    grandchild = int((tmp_path / "pid").read_text())
    assert each_workload.wait_or_kill(child, 0.01) is None
    assert child.returncode == -signal.SIGKILL
    state = Path(f"/proc/{grandchild}/stat")
    wait_until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z")
    quick = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert each_workload.wait_or_kill(quick, 30) == 3


def test_time_is_told_by_what_it_was_spent_on() -> None:
    watch = each_workload.Stopwatch()
    with watch("building"):
        pass
    assert list(watch.spent_s) == ["building"]
    results = {"gpt2": {"spent_s": {"building": 4.0}}, "moe": {"spent_s": {"building": 8.0}}}
    assert list(each_workload.spent_on(results)) == [
        "seconds for building: 12 in all, 6.0 a workload, most moe (8.0)"
    ]


def test_results_travel_in_one_file_without_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "promises"
    each_workload.save(out, "gpt2", {"finished": True})
    (out / each_workload.RUNS / "moe-1").mkdir(parents=True)  # of a process that was killed
    monkeypatch.setattr(each_workload, "_start", lambda *_: None)
    given = ["gpt2", "--out", str(out), "--turns", str(tmp_path / "t")]
    options = each_workload.options_for("", "x").parse_args(given)
    assert each_workload.run_each(options, one_never_runs)
    assert each_workload.read(tmp_path / "promises.json") == {"gpt2": {"finished": True}}
    assert not (out / each_workload.RUNS).exists()
    with each_workload.run_folder("gpt2", options) as folder:
        folder.mkdir(parents=True)
    assert not folder.exists()
    options.keep_runs = True
    with each_workload.run_folder("gpt2", options) as folder:
        folder.mkdir(parents=True)
    assert folder.exists()


@pytest.mark.slow
def test_ways_of_one_workload_train_in_processes_of_their_own(tmp_path: Path) -> None:
    import torch

    import stepscope
    from forked_training import (
        FIRST,
        TrainingFailedError,
        Way,
        Window,
        forked,
        measure_in_turns,
    )
    from library_turn import Turns

    window = Window(folder=tmp_path / "run", wait=4)
    ways = [Way(), Way(remedies=("fused-optimizer",)), Way(batches=2), Way(optimizer={"no": 1})]
    with forked("gpt2", "tiny", "cpu", ways) as (plain, fused, twice, broken):
        plain.build()
        traced = plain.capture(window)
        assert traced == range(FIRST + 6, FIRST + 9)
        plain.train(window.steps + 4)
        fused.build()
        twice.build()
        assert fused.facts().not_applied is None
        assert twice.facts().batch == 2 * plain.facts().batch
        blocks = measure_in_turns([fused, twice], Turns(tmp_path / "turns"), 2)
        assert [len(one) for one in blocks] == [2, 2]
        with pytest.raises(TrainingFailedError, match="unexpected keyword argument 'no'"):
            broken.build()
    assert stepscope.explain(window.folder, cache=False).ranks[0].memory is not None
    assert not torch.cuda.is_initialized()
