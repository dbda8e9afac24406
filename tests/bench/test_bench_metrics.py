"""Runs of a workload -> its result: from captured runs, and from made-up numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.bench.catalogue import load
from stepscope.bench.task import BenchTask
from stepscope.records.hardware import DtypeUse, Efficiency
from stepscope.ui.bench.results import (
    BenchRun,
    ExplainedRun,
    captured_per_step,
    compute_share,
    explain_run,
    whole_steps,
    with_speedups,
    workload_result,
)

GOLDEN = Path(__file__).parent.parent / "golden"
TASK = BenchTask(workload=load("gpt2"), size="tiny", changes={"batch": "4"}, ranks=2)
LOSSES = (4.0, *[1.5] * 59)


def made_run(number: int, ms: float, **more: Any) -> BenchRun:
    steps = np.full(20, ms)
    known = {"steps_ms": steps, "losses": LOSSES, "folder": Path("x"), "seconds": 2.0}
    return BenchRun(**{"number": number, **known, **more})


@pytest.mark.parametrize("name", ["cpu-two-ranks", "h200-resnet18"])
def test_the_budget_of_a_captured_run_adds_up_to_the_step(name: str) -> None:
    explained = explain_run(made_run(1, 12.5, folder=GOLDEN / name))
    result = workload_result(TASK, [made_run(1, 12.5)], explained)
    assert sum(result.budget_ms.values()) == pytest.approx(12.5)
    assert result.busy is not None
    assert 0 < result.busy <= 1
    assert result.verdict


def test_a_run_on_a_known_device_has_its_share_of_the_peak() -> None:
    explained = explain_run(made_run(1, 12.5, folder=GOLDEN / "h200-resnet18"))
    fields = explained.fields
    assert 0 < fields["mfu"] < 1
    assert fields["flops"] > 1e9
    kinds = fields["compute_share"]
    assert "tensor" in kinds
    assert 0 <= kinds["tensor"] <= sum(kinds.values()) - kinds["tensor"] + 1e-9
    assert explained.ceilings is not None
    assert explained.ceilings.bytes_s


def test_flops_count_all_optimizer_steps_of_a_workloads_step() -> None:
    folder = GOLDEN / "h200-resnet18"
    once = explain_run(made_run(1, 12.5, folder=folder)).fields
    five = explain_run(made_run(1, 12.5, folder=folder, captured_per_step=5.0)).fields
    assert five["flops"] == pytest.approx(5 * once["flops"])
    assert five["bytes_moved"] == pytest.approx(5 * once["bytes_moved"])
    assert five["mfu"] == once["mfu"]


def test_throughput_is_that_of_all_ranks() -> None:
    result = workload_result(TASK, [made_run(1, 20.0)], None)
    assert result.samples_per_s == pytest.approx(4 * 2 / 0.020)
    assert result.settings["batch"] == 4
    assert result.step_ms == 20.0
    assert result.mfu is None
    assert result.peak_bytes is None
    assert result.budget_ms == {}


def test_time_to_target_counts_steps_not_start_up() -> None:
    result = workload_result(TASK, [made_run(1, 20.0)], None)
    assert result.target_reached
    assert result.steps_to_target == 5
    assert result.time_to_target_s == pytest.approx(0.1)


def test_a_row_that_failed_says_why_and_has_no_numbers() -> None:
    run = made_run(1, 20.0, failed="ValueError: no", steps_ms=np.empty(0))
    result = workload_result(TASK, [run], None)
    assert (result.status, result.why, result.samples_per_s) == ("failed", "ValueError: no", None)
    assert result.target_loss is not None
    assert result.target_reached is None


def test_a_later_run_that_fails_does_not_take_the_numbers_away() -> None:
    runs = [made_run(1, 20.0), made_run(2, 20.0, failed="killed", steps_ms=np.empty(0))]
    result = workload_result(TASK, runs, ExplainedRun())
    assert (result.status, result.why, result.step_ms) == ("failed", "killed", 20.0)


def test_a_row_with_remedies_is_compared_with_the_row_without() -> None:
    changed = BenchTask(workload=load("gpt2"), size="tiny", remedies=("bf16",), ranks=2)
    plain = workload_result(TASK, [made_run(1, 20.0), made_run(2, 21.0)], None)
    faster = workload_result(changed, [made_run(1, 10.0), made_run(2, 10.4)], None)
    rows = with_speedups([plain, faster])
    assert rows[0].speedup is None
    assert rows[1].speedup == pytest.approx(2.0, rel=0.02)
    assert with_speedups([faster])[0].speedup is None


def test_optimizer_steps_are_joined_to_the_workloads_own() -> None:
    """WGAN-GP trains its critic five times a step."""
    assert captured_per_step(300, 60) == 5.0
    assert captured_per_step(60, 60) == captured_per_step(58, 60) == captured_per_step(61, 60) == 1
    assert captured_per_step(30, 60) == 0.5
    joined = whole_steps(np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]), 3.0)
    assert joined.tolist() == [6.0, 15.0]
    assert whole_steps(np.array([8.0]), 0.5).tolist() == [4.0]


def test_the_share_of_the_peak_is_taken_of_each_kind() -> None:
    def use(dtype: str, flops: int, tensor_ns: int, peak: float | None) -> DtypeUse:
        return DtypeUse(
            dtype=dtype, flops=flops, device_ns=1000, tensor_core_ns=tensor_ns, peak_flops=peak
        )

    efficiency = Efficiency(
        mfu=None,
        hfu=None,
        model_flops=0,
        hardware_flops=0,
        recomputed_flops=0,
        peak_flops=None,
        peak_source=None,
        dtype="bf16",
        unknown_share=0.0,
        tensor_core_share=0.5,
        step_ms=1.0,
        by_dtype=(use("bf16", 100, 500, 1e6), use("fp32", 10, 0, 1e5), use("fp8", 10, 0, None)),
        ceilings=None,
        spots=(),
    )
    shares = compute_share(efficiency)
    assert shares == pytest.approx({"bf16": 0.1, "fp32": 0.1, "tensor": 0.05})
