"""What is read when a step ends, and how rarely."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepscope.measure.never_raise import problems
from stepscope.measure.steps.step_times import StepMeter

MS = 1_000_000


class Cuda:
    """A device whose allocator is asked."""

    def __init__(self) -> None:
        self.initialised, self.capturing, self.asked = False, False, 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialised)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch._C, "_cuda_memoryStats", self.statistics, raising=False)

    def statistics(self, _device: int) -> dict[str, Any]:
        self.asked += 1
        return {"allocated_bytes": {"all": {"current": 4096}}, "num_alloc_retries": 3}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    device = Cuda()
    device.install(monkeypatch)
    return device


def readings(walls_ms: list[int]) -> list[bool]:
    """After which of steps that take this long something is read. The first reading is due at once;
    each seems to take 10 us, so that the next is due 10 ms later."""
    meter = StepMeter()
    now = meter._ended
    taken = []
    for wall in walls_ms:
        now += wall * MS
        taken.append(meter.read(now) is not None)
        if taken[-1]:
            meter._due = now + 10 * MS
    return taken


def test_values_are_read_at_a_pace_and_after_every_long_step() -> None:
    yes, no = True, False
    assert readings([4, 4, 4, 4, 4]) == [yes, no, no, yes, no]
    assert readings([2, 2, 4, 2, 2, 2]) == [yes, no, yes, no, no, no]
    assert readings([20, 20, 20]) == [yes, yes, yes]


def test_one_very_long_step_does_not_hide_the_next() -> None:
    assert readings([2, 2000, 2, 4]) == [True, True, False, True]


def test_a_reading_is_followed_by_a_thousand_times_as_long_without() -> None:
    meter = StepMeter()
    assert meter.read(meter._ended) is not None
    assert meter._due > meter._ended


def test_counters_are_those_of_the_thread_that_trains() -> None:
    meter = StepMeter()
    reading = meter._read()
    assert reading is not None
    began, (scheduler, faults), _ = reading
    assert began is None
    assert scheduler is not None
    assert len(scheduler.split()) == 3
    assert isinstance(faults, int)


def test_after_a_pause_of_ours_a_step_counts_from_its_own_beginning() -> None:
    meter = StepMeter()
    meter.restart(meter._ended + 5 * MS)
    first, second = meter._read(), meter._read()
    assert first is not None
    assert second is not None
    assert first[0] is not None
    assert second[0] is None


def test_a_device_is_asked_only_once_it_is_in_use_and_never_while_a_graph_is_captured(
    cuda: Cuda,
) -> None:
    meter = StepMeter()
    assert isinstance(meter._memory(), bytes)
    assert (cuda.asked, meter.content()["memory"]) == (0, "host")
    cuda.initialised = True
    assert meter._memory() == (4096, 3)
    assert meter.content()["memory"] == "device"
    cuda.capturing = True
    assert meter._memory() is None  # not the host's: a column has one meaning
    assert cuda.asked == 1


def test_a_system_that_has_none_of_it_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.measure.steps.step_times._SCHEDULER", "/nowhere")
    monkeypatch.setattr("stepscope.measure.steps.step_times._MEMORY", "/nowhere")
    monkeypatch.delattr("resource.RUSAGE_THREAD")
    monkeypatch.setattr(StepMeter, "_device_memory", lambda _self: None)
    before = problems()
    meter = StepMeter()
    assert meter._read() == (None, (None, None), None)
    content = SimpleNamespace(**meter.content())
    assert (content.cpu_wait_ns, content.major_faults, content.memory) == (False, False, None)
    assert problems() == before


def test_an_allocator_that_cannot_be_read_costs_its_own_column_only(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.initialised = True
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", None)
    meter = StepMeter()
    reading = meter._read()
    assert reading is not None
    assert reading[2] is None
    assert any("memory at step ends" in problem for problem in problems())
