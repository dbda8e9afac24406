"""A step brought to what its run measured without the profiler."""

from __future__ import annotations

import pytest

from graphs import Call, Task, make, measured
from stepscope.step.correct import fit_to, scale_host
from stepscope.step.graph import Phase, StepGraph
from stepscope.step.replay import step_ns


def test_the_host_is_scaled_where_it_decides() -> None:
    graph = make(Call(1000, tasks=(Task(100),)))
    found, scale = fit_to(graph, measured(600))
    assert step_ns(found) == pytest.approx(600, rel=1e-3)
    assert scale == pytest.approx(0.6, rel=1e-3)
    assert found.tasks.dur_ns.tolist() == [100]


def test_where_the_device_decides_the_host_stays_as_it_was() -> None:
    graph = make(Call(400, tasks=(Task(1000),)))
    found, _ = fit_to(graph, measured(990))
    assert step_ns(found) == pytest.approx(990)
    assert found.host_ns == 400


def test_a_host_thought_slower_than_the_step_only_just_fits_into_it() -> None:
    """It did not vanish: it may be as slow as the step allows."""
    graph = make(Call(1200, tasks=(Task(1000),)))
    found, _ = fit_to(graph, measured(1000))
    assert step_ns(found) == pytest.approx(1000, rel=0.01)
    assert found.host_ns == pytest.approx(1000, rel=0.02)


def test_a_step_a_little_longer_than_the_devices_is_the_hosts_if_that_may_be_so_slow() -> None:
    graph = make(Call(950, tasks=(Task(1000),)))
    found, scale = fit_to(graph, measured(1080))
    assert scale == pytest.approx(1080 / 950, rel=1e-3)
    assert found.tasks.dur_ns.tolist() == [1000]


def test_and_the_devices_if_the_host_would_have_to_be_far_slower() -> None:
    graph = make(Call(400, tasks=(Task(1000),)))
    found, scale = fit_to(graph, measured(1080))
    assert scale == 1.0
    assert found.tasks.dur_ns.tolist() == pytest.approx([1080])


def waits_in_the_middle(gap: float) -> StepGraph:
    """The device idles for `gap` after the host has waited for it."""
    return make(
        Call(100, tasks=(Task(1000),)),
        Call(0, waits=(0,)),
        Call(gap, tasks=(Task(1000),), phase=Phase.BACKWARD),
    )


def test_a_device_is_scaled_by_what_the_host_does_not_explain() -> None:
    """The host's time is known, and 100 of it show in the step: kernels took 2050 and not 2150."""
    host = {"forward": 100, "backward": 100}
    found, _ = fit_to(waits_in_the_middle(100), measured(2150, host=host))
    assert step_ns(found) == pytest.approx(2150)
    assert found.tasks.dur_ns.sum() == pytest.approx(2050, rel=1e-4)
    assert found.host_ns == 200


def test_a_step_a_little_shorter_than_its_replay_does_not_make_the_host_faster() -> None:
    found, scale = fit_to(waits_in_the_middle(20), measured(2010))
    assert step_ns(found) == pytest.approx(2010)
    assert scale == 1.0
    assert found.host_ns == 120


def test_a_window_in_which_all_was_slower_is_brought_to_the_measured_step() -> None:
    graph = make(Call(900, tasks=(Task(1000),)))
    found, _ = fit_to(graph, measured(400))
    assert step_ns(found) == pytest.approx(400, rel=0.01)


def phases(forward: float, backward: float, optimizer: float, device: float) -> tuple[Call, ...]:
    return (
        Call(forward, tasks=(Task(device),)),
        Call(backward, tasks=(Task(device),), phase=Phase.BACKWARD),
        Call(optimizer, tasks=(Task(device),), phase=Phase.OPTIMIZER),
    )


def test_steps_whose_host_ran_ahead_tell_each_phase_even_if_the_device_decides() -> None:
    graph = make(*phases(300, 500, 100, device=1000))
    host = {"forward": 150, "backward": 200, "optimizer": 90}
    found, _ = fit_to(graph, measured(3000, host=host))
    assert found.calls.gap_ns.tolist() == pytest.approx([150, 200, 90])
    assert step_ns(found) == pytest.approx(3000)


def test_where_the_host_decides_its_phases_are_the_measured_ones() -> None:
    graph = make(*phases(300, 500, 100, device=10))
    told = {"forward": 150, "data": 10, "other": 0, "backward": 200, "optimizer": 90}
    found, _ = fit_to(graph, measured(450, phases=told))
    assert found.calls.gap_ns.tolist() == pytest.approx([160, 200, 90], rel=0.01)


def test_phases_of_a_throttled_host_are_not_taken_for_its_own_time() -> None:
    """Steady steps of a device-bound run: the host waits inside backward for a full queue."""
    graph = make(*phases(300, 500, 100, device=1000))
    found, _ = fit_to(
        graph, measured(3000, phases={"forward": 300, "backward": 2600, "optimizer": 100})
    )
    assert found.calls.gap_ns.tolist() == [300, 500, 100]


def test_a_phase_that_the_trace_cuts_elsewhere_keeps_its_time() -> None:
    graph = make(*phases(300, 500, 100, device=1000))
    found, _ = fit_to(graph, measured(3000, host={"forward": 150, "optimizer": 900}))
    assert found.calls.gap_ns.tolist() == pytest.approx([150, 500, 100])


def test_scaling_the_host_to_nothing_leaves_the_device() -> None:
    assert step_ns(scale_host(make(Call(1000, tasks=(Task(100),))), 0.0)) == pytest.approx(100)
