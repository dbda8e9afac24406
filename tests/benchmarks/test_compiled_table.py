"""Compiled and graphed steps: the order of the rows, rows beside each other, how they print."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmarks train")

import compiled_table
from compiled_table import (
    IN_ALL_PRECISIONS,
    WAYS,
    Rows,
    markdown,
    memory_verdict,
    plan,
    same_steps_ms,
    shortened,
)
from library_turn import end_with_children
from outside_pools import bytes_outside_pools

PROGRAM = Path(compiled_table.__file__)
GOOD = {"bare_ms": 12.5, "findings": [], "run_findings": []}


def options(**changes: Any) -> argparse.Namespace:
    defaults = {"only": "gpt2,bert", "ways": None, "precisions": "bf16,fp32", "tiny": False}
    limits = {"seconds": 300.0, "row_seconds": 300.0, "at_once": 2}
    return argparse.Namespace(**defaults | limits | changes)


def row(**changes: Any) -> dict[str, Any]:
    return {"model": "gpt2", "way": "eager", "precision": "bf16", **GOOD, **changes}


def test_all_ways_in_bf16_come_first_and_what_compiles_for_minutes_last() -> None:
    rows = plan(options())
    assert len(set(rows)) == len(rows) == 2 * (len(WAYS) + len(IN_ALL_PRECISIONS))
    assert rows[:2] == [("gpt2", "reduce-overhead", "bf16"), ("bert", "reduce-overhead", "bf16")]
    assert {way for _, way, _ in rows[-2:]} == {"max-autotune-no-cudagraphs"}


def test_ways_that_are_named_come_in_all_precisions() -> None:
    rows = plan(options(ways="graphed callables"))
    assert {precision for *_, precision in rows} == {"bf16", "fp32"}


def test_a_failed_row_stands_beside_the_others() -> None:
    good = row(mfu=0.3, expected_mfu=0.4, flops_ratio=1.0, run_findings=["start-up 90% (low)"])
    bad = {"model": "bert", "way": "eager", "precision": "bf16", "error": "out of memory"}
    text = markdown([good, bad])
    assert "| gpt2 eager bf16 | 12.50 | 0.750 | 1.000 | - |" in text
    assert "gpt2 eager bf16: no finding; of the run: start-up 90% (low)" in text
    assert "bert eager bf16: failed: out of memory" in text


def test_memory_is_within_three_percent_only_if_both_ratios_are() -> None:
    known = row(peak_ratio=0.99, reserved_ratio=1.02, peak_truth="driver", counted_by="NVML")
    assert memory_verdict(known) == "within 3% (peak: driver; NVML)"
    assert memory_verdict(known | {"reserved_ratio": 0.96}).startswith("NOT within")
    assert memory_verdict(known | {"reserved_ratio": None}) == "not known"


def test_with_graphs_the_peak_is_held_against_the_driver_less_the_cache() -> None:
    memory = argparse.Namespace(peak_bytes=90, reserved_bytes=100, categories={"other": 90})
    facts = {"driver_bytes": 100, "allocated_bytes": 60, "cached_bytes": 10}
    graphed = compiled_table._memory_ratios(memory, facts | {"way": "whole-step graph"})
    assert (graphed["peak_ratio"], graphed["reserved_ratio"]) == (1.0, 1.0)
    plain = compiled_table._memory_ratios(memory, facts | {"way": "default"})
    assert (plain["peak_ratio"], plain["peak_truth"]) == (1.5, "torch")


def test_what_is_free_in_a_pool_is_no_cache() -> None:
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 20, "allocated_size": 5},
        {"segment_pool_id": (0, 1), "total_size": 100, "allocated_size": 30},
        {"total_size": 4, "allocated_size": 4},
    ]
    assert bytes_outside_pools(segments).cached_bytes == 15


def test_the_step_is_held_against_the_trainings_own_times_of_the_same_steps(tmp_path: Path) -> None:
    """Capture counted a pass before; its window and the step after it are not steady. In the
    training's time of the step before the window, the profiler starts."""
    folder = tmp_path / "rank-00000"
    folder.mkdir()
    lines = [
        {"step": n, "wall_ns": 10**7, "backward_ns": 10**6, "window": n in (12, 13)}
        for n in range(21)
    ]
    lines[0]["first"] = True
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = [float(n) for n in range(1, 21)]  # the training's first step is capture's second
    same = [n for n in range(1, 21) if n not in (11, 12, 13, 14)]
    assert same_steps_ms(tmp_path, {"bare_ms": 5.0, "steps_ms": own}) == sum(same) / len(same)
    assert same_steps_ms(tmp_path, {"bare_ms": 5.0}) == 5.0


def test_a_long_error_keeps_its_first_words_and_its_end() -> None:
    text = "Traceback\n  File x\nRuntimeError: captured\n" + 3000 * "y" + "\nthe end"
    words = shortened(text)
    assert words.startswith("RuntimeError: captured [...] yyy")
    assert words.endswith("the end")
    assert len(words) < 1600
    assert shortened("ValueError: short") == "ValueError: short"


def test_rows_run_beside_each_other_and_one_that_dies_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=30)

    def run_row(case: tuple[str, str, str], _limit_s: float, _options: Any) -> dict[str, Any]:
        both.wait()
        dies = ["-c", f"import os; os.kill(os.getpid(), {signal.SIGKILL:d})"]
        if case[0] == "gpt2":
            compiled_table._run_to_end(dies, 30)
        return dict(GOOD)

    monkeypatch.setattr(compiled_table, "run_row", run_row)
    file = tmp_path / "new" / "rows.json"
    Rows(file, []).measure(options(ways="eager", precisions="bf16"))
    saved = {row["model"]: row for row in json.loads(file.read_text())}
    assert saved["gpt2"]["error"].startswith("RuntimeError: exit code -9")
    assert saved["bert"]["bare_ms"] == 12.5


def test_known_rows_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def run_row(case: tuple[str, str, str], _limit_s: float, _options: Any) -> dict[str, Any]:
        measured.append(case)
        return dict(GOOD)

    monkeypatch.setattr(compiled_table, "run_row", run_row)
    Rows(tmp_path / "rows.json", [row()]).measure(options(ways="eager", precisions="bf16"))
    assert measured == [("bert", "eager", "bf16")]


def test_a_row_past_its_time_is_ended() -> None:
    with pytest.raises(RuntimeError, match="ended after 1 s"):
        compiled_table._run_to_end(["-c", "import time; time.sleep(300)"], 1)


def test_a_process_is_ended_with_all_that_it_started() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    process, end = int(parent.stdout.readline()), time.monotonic() + 30
    end_with_children(parent.pid)
    parent.communicate()
    while _runs(process):
        assert time.monotonic() < end
        time.sleep(0.02)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.slow
def test_a_llama_goes_all_the_way_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "rows.json"
    words = ["--tiny", "--only", "llama", "--at-once", "2", "--seconds", "280"]
    subprocess.run([sys.executable, PROGRAM, "--save", file, *words], check=True, timeout=300)
    rows = json.loads(file.read_text())
    assert {row["way"] for row in rows} == {"eager", "default"}
    assert all(row["flops_ratio"] == pytest.approx(1.0, abs=0.02) for row in rows)
    assert all(row["parts_ratio"] == pytest.approx(1.0) for row in rows)
