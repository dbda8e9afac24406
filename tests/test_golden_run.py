"""A run folder recorded on an H200 (ResNet-18, batch 128, fp32) holds what capture promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stepscope
from measured import read_measured_steps

RUN = Path(__file__).parent / "golden/h200-resnet18"
RANK = RUN / "rank-00000"
# The script's own timing, without the profiler, in the same session (benchmarks/capture.py).
SCRIPT_MS = 24.86


def test_the_step_of_record_is_the_scripts_own_timing() -> None:
    (rank,) = stepscope.explain_job(RUN).ranks
    assert rank.step_ms.truth == pytest.approx(SCRIPT_MS, rel=0.02)
    assert rank.step_ms.profiled == pytest.approx(SCRIPT_MS, rel=0.02)
    assert rank.budget.step_ms == rank.step_ms.truth
    assert sum(part.ms for part in rank.budget.parts) == pytest.approx(rank.budget.step_ms)


def test_device_times_are_there_for_every_plain_step() -> None:
    truth = read_measured_steps(RANK / "trace.json.gz")
    assert truth is not None
    assert truth.device_ns is not None
    # 100 minus the first, the five of the window, the memory step, and the ones after these two
    assert truth.steps == 91
    assert truth.wall_ns == pytest.approx(truth.device_ns, rel=0.02)


def test_memory_categories_add_up_to_the_allocators_peak() -> None:
    memory = json.loads((RANK / "memory.json").read_text())
    peak = memory["peak"]
    assert sum(peak["categories"].values()) == peak["allocated_bytes"]
    assert peak["allocated_bytes"] == pytest.approx(peak["since_start_bytes"], rel=0.02)
    # 11,689,512 parameters of ResNet-18, four bytes each; SGD with momentum keeps one more copy
    assert memory["categories"]["parameters"] == 4 * 11_689_512
    assert memory["categories"]["optimizer"] == 4 * 11_689_512


def test_the_trace_agrees_with_itself() -> None:
    (rank,) = stepscope.explain_job(RUN).ranks
    assert [step.name for step in rank.steps.steps] == [f"ProfilerStep#{n}" for n in (22, 23, 24)]
    # the device is busy all the time, with convolutions that transpose every input (NCHW)
    assert rank.findings[0].id == "layout-copies"
