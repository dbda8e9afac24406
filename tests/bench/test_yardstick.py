"""A step beside a yardstick: what the machine does to both does not count."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from test_against import MACHINE, only_change, results, row

from stepscope.bench.against import EnoughRuns, compare_results, slower_by
from stepscope.bench.train import Yardstick, middle_ratio, step_over_yardstick

if TYPE_CHECKING:
    from pathlib import Path

STEADY = (2.0, 2.01, 1.99, 2.005, 1.995)
SLOWER_MACHINE = (13.0, 13.3, 12.8, 13.1, 12.9)


def test_a_machine_whose_pace_changes_within_a_run_changes_both_and_not_the_ratio() -> None:
    pace = np.linspace(1.0, 3.0, 101)
    steps = 8.0 * (pace[:-1] + pace[1:]) / 2
    assert middle_ratio(list(steps), list(4.0 * pace)) == pytest.approx(2.0)


def test_a_pause_of_either_is_left_out() -> None:
    steps, yards = [8.0] * 100, [4.0] * 101
    steps[10], yards[50] = 800.0, 400.0
    assert middle_ratio(steps, yards) == pytest.approx(2.0)


def test_a_step_of_two_yardsticks_takes_two() -> None:
    yardstick = Yardstick()

    def step(number: int) -> None:
        yardstick()
        yardstick()

    two = pytest.approx(2.0, rel=0.3)
    tries = (step_over_yardstick(step, yardstick, 0.1) for _ in range(8))  # others use the cores
    assert any(ratio.step == two and ratio.computing == two for ratio in tries)


def test_a_step_that_sleeps_takes_longer_and_computes_as_long() -> None:
    yardstick = Yardstick()

    def step(number: int) -> None:
        yardstick()
        time.sleep(0.05)

    ratio = step_over_yardstick(step, yardstick, 0.1)
    assert ratio.step > 1.3 * ratio.computing


def test_the_yardstick_leaves_the_random_numbers_and_gradients_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    Yardstick()()
    assert torch.equal(torch.rand(3), expected)
    assert torch.is_grad_enabled()


def test_a_paced_training_writes_its_ratio(tmp_path: Path) -> None:
    file = tmp_path / "ratio.json"
    command = [sys.executable, "-m", "stepscope.bench.train", "ncf", "--paced=0.2"]
    subprocess.run([*command, f"--losses={file}"], check=True, timeout=120)
    written = json.loads(file.read_text())
    assert list(written) == ["step_over_yardstick", "computing_over_yardstick"]
    assert 0.01 < written["step_over_yardstick"] < 100


def test_a_paced_training_without_a_file_is_refused() -> None:
    command = [sys.executable, "-m", "stepscope.bench.train", "ncf", "--paced=0.2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--losses FILE is needed" in done.stderr


def test_a_slower_machine_is_no_slower_workload() -> None:
    change = only_change(row(paced=STEADY), row(SLOWER_MACHINE, paced=STEADY))
    assert change.verdict == "no difference seen"
    assert change.paced
    assert change.pace_change == pytest.approx(0.30, abs=0.01)
    assert "the machine itself is 30% slower" in change.notes[0]
    assert (change.base_ms, change.now_ms) == pytest.approx((10.0, 13.0), rel=0.01)


def test_a_slower_workload_is_found_on_a_faster_machine() -> None:
    slower = tuple(1.05 * ratio for ratio in STEADY)
    comparison = compare_results(
        results(row(SLOWER_MACHINE, paced=STEADY)), results(row(paced=slower)), "base.json"
    )
    (found,) = slower_by(comparison, 0.03)
    assert found.change == pytest.approx(0.05)


def test_a_yardstick_that_differs_more_than_the_plain_runs_is_left_alone() -> None:
    """The step waits for memory; the processor's clock changes the yardstick alone."""
    unlike = (0.86, 1.07, 0.9, 1.06, 0.87)
    change = only_change(row(paced=unlike), row(paced=unlike[::-1]))
    assert not change.paced
    assert change.verdict == "no difference seen"


def test_without_a_yardstick_on_both_sides_plain_runs_are_compared() -> None:
    change = only_change(row(), row(SLOWER_MACHINE, paced=STEADY))
    assert change.verdict == "slower"
    assert not change.paced


def test_another_torch_is_a_change_of_the_yardstick_too() -> None:
    newer = replace(MACHINE, torch="2.14.0")
    base = results(row(paced=STEADY))
    now = results(row(SLOWER_MACHINE, paced=STEADY), machine=newer)
    (change,) = compare_results(base, now, "base.json").workloads
    assert change.verdict == "slower"


def test_runs_are_paced_on_a_processor_in_one_process_if_the_base_is() -> None:
    alone = EnoughRuns(workloads=1)
    assert alone.paces(row(), MACHINE)
    assert not alone.paces(row(), replace(MACHINE, device="NVIDIA H200"))
    assert not alone.paces(row(ranks=2), MACHINE)
    assert EnoughRuns(workloads=1, base=results(row(paced=STEADY))).paces(row(), MACHINE)
    assert not EnoughRuns(workloads=1, base=results(row())).paces(row(), MACHINE)
