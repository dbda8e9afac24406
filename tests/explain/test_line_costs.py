"""Costs by line of code, on traces whose answers were worked out by hand."""

from __future__ import annotations

import pytest

from stepscope.errors import NotCapturedError
from stepscope.explain.line_costs import cost_lines, operator_times, tensor_shapes, work_of
from stepscope.records.source_lines import LineCosts

from .build import AUTOGRAD, MAIN, Events, kernel, note, op, step
from .conftest import Read

NODE = "autograd::engine::evaluate_function: "


def line(number: int, *, start: float, dur: float, function: str = "main") -> Events:
    return op(f"stepscope line /work/train.py({number}): {function}", start=start, dur=dur)


def running(number: int, *, start: float, dur: float) -> Events:
    """A line that was running when the step began."""
    return op(f"stepscope in line /work/train.py({number}): main", start=start, dur=dur)


def table(costs: LineCosts) -> dict[int, tuple[float, float, float, float]]:
    """line -> forward, backward, optimizer, other; 1 ms of the step is 1 µs of the trace."""
    return {
        cost.line: tuple(
            round(ms, 6)
            for ms in (cost.forward_ms, cost.backward_ms, cost.optimizer_ms, cost.other_ms)
        )
        for cost in costs.lines
    }


def cpu_step() -> list[Events]:
    """0-100: line 1 waits for data, 3 and 4 run inside 2, backward undoes them, 6 updates."""
    return [
        step(5, start=0, dur=100),
        running(6, start=0, dur=2),
        line(1, start=2, dur=8),
        note("enumerate(DataLoader)#_Iter.__next__", start=3, dur=6),
        line(2, start=10, dur=30),
        line(3, start=12, dur=10, function="forward"),
        op("aten::linear", start=13, dur=8, sequence=7, shapes=[[4, 8], [8, 8]]),
        op("aten::addmm", start=14, dur=6, sequence=7),
        line(4, start=24, dur=14, function="forward"),
        op("aten::relu", start=25, dur=12, sequence=8, shapes=[[4, 8]]),
        line(5, start=40, dur=40),
        op(f"{NODE}ReluBackward0", start=42, dur=10, sequence=8, forward_thread=1),
        op(f"{NODE}AddmmBackward0", start=54, dur=20, sequence=7, forward_thread=1),
        op("aten::mm", start=55, dur=18),
        op(f"{NODE}torch::autograd::AccumulateGrad", start=76, dur=3),
        line(6, start=80, dur=15),
        note("Optimizer.step#SGD.step", start=82, dur=16),  # it ends after the mark
        op("aten::add_", start=84, dur=10),
    ]


def test_every_microsecond_of_a_cpu_step_has_one_line(read: Read) -> None:
    costs = cost_lines(read(*cpu_step(), device=None), step_ms=100)
    assert table(costs) == {
        1: (0, 0, 0, 8),
        2: (0, 0, 0, 6),  # 30 without lines 3 and 4
        3: (8, 20, 0, 2),
        4: (12, 10, 0, 2),
        5: (0, 3, 0, 7),  # the engine, and gradients that no line made
        6: (0, 0, 13, 4),  # 2 of the step before it, and 2 before the optimizer begins
    }
    assert costs.other_ms == pytest.approx(5)  # after line 6
    assert sum(cost.total_ms for cost in costs.lines) + costs.other_ms == pytest.approx(100)


def test_times_are_scaled_to_the_step_without_the_profiler(read: Read) -> None:
    costs = cost_lines(read(*cpu_step(), device=None), step_ms=50)
    assert table(costs)[3] == (4, 10, 0, 1)
    assert costs.lines[0].line == 3
    assert costs.lines[0].share == pytest.approx(0.3)


def test_a_line_lists_its_outermost_operators_calls_and_kept_bytes(read: Read) -> None:
    kept = {("/work/train.py", 3): 4096}
    costs = cost_lines(read(*cpu_step(), device=None), step_ms=100, kept=kept)
    third = costs.at("/work/train.py", 3)
    assert third is not None
    assert [(one.name, one.calls, one.ms) for one in third.operators] == [
        ("AddmmBackward0", 1, 20),
        ("aten::linear", 1, 8),
    ]
    assert third.operators[1].shapes == "[[4, 8], [8, 8]]"
    assert (third.calls, third.kept_bytes, third.function) == (1, 4096, "forward")
    sixth = costs.at("/work/train.py", 6)
    assert sixth is not None
    assert (sixth.calls, sixth.kept_bytes) == (1, 0)  # it did not begin twice


def test_without_a_memory_step_kept_bytes_are_not_known(read: Read) -> None:
    costs = cost_lines(read(*cpu_step(), device=None), step_ms=100)
    assert {cost.kept_bytes for cost in costs.lines} == {None}


def test_a_line_that_runs_inside_backward_keeps_its_own_time(read: Read) -> None:
    """A custom function's backward is the user's own code."""
    trace = read(
        step(1, start=0, dur=60),
        line(1, start=0, dur=20),
        op("MyFunction", start=2, dur=10, sequence=3),
        line(2, start=20, dur=40),
        op(f"{NODE}MyFunctionBackward", start=22, dur=30, sequence=3, forward_thread=1),
        line(9, start=25, dur=20, function="backward"),
        op("aten::mul", start=30, dur=10),
        device=None,
    )
    assert table(cost_lines(trace, step_ms=60)) == {
        1: (10, 10, 0, 10),
        2: (0, 0, 0, 10),
        9: (0, 20, 0, 0),
    }


def test_a_comprehension_counts_for_its_line_once(read: Read) -> None:
    trace = read(
        step(1, start=0, dur=20),
        line(1, start=0, dur=20),
        line(1, start=5, dur=10, function="<listcomp>"),
        op("aten::add", start=6, dur=4),
        device=None,
    )
    costs = cost_lines(trace, step_ms=20)
    assert [(cost.function, cost.calls, cost.total_ms) for cost in costs.lines] == [("main", 1, 20)]


def test_on_a_device_a_gap_belongs_to_the_line_whose_launch_ends_it(read: Read) -> None:
    """Device: gemm 20-50, gap to 70, relu 70-80, its backward 80-95 on autograd's thread."""
    trace = read(
        step(1, start=0, dur=100),
        line(1, start=0, dur=20),
        op("aten::mm", start=2, dur=10, sequence=1),
        kernel("gemm", start=20, dur=30, launched_at=5),
        line(2, start=20, dur=50),
        op("aten::relu", start=60, dur=8, sequence=2),
        kernel("relu", start=70, dur=10, launched_at=64),
        line(3, start=70, dur=30),
        op(f"{NODE}ReluBackward0", start=72, dur=6, thread=AUTOGRAD, sequence=2, forward_thread=1),
        kernel("relu_backward", start=80, dur=15, launched_at=74, thread=AUTOGRAD),
        op(f"{NODE}AccumulateGrad", start=80, dur=4, thread=AUTOGRAD),
        kernel("add", start=95, dur=5, launched_at=82, thread=AUTOGRAD),
    )
    costs = cost_lines(trace, step_ms=80)  # the device's 20-100
    assert table(costs) == {1: (30, 0, 0, 0), 2: (30, 15, 0, 0), 3: (0, 5, 0, 0)}
    second = costs.at("/work/train.py", 2)
    assert second is not None
    assert [(one.name, one.ms) for one in second.kernels] == [("relu_backward", 15), ("relu", 10)]
    assert costs.other_ms == pytest.approx(0)


def test_a_trace_without_marks_says_how_to_get_them(read: Read) -> None:
    trace = read(step(1, start=0, dur=10), op("aten::mm", start=1, dur=5, thread=MAIN))
    with pytest.raises(NotCapturedError, match="stepscope run --lines"):
        cost_lines(trace, step_ms=10)


def test_operators_are_timed_by_shapes_or_scaled_by_their_work(read: Read) -> None:
    floats = ["float", "float"]
    trace = read(
        step(1, start=0, dur=100),
        line(1, start=0, dur=100),
        op("aten::mm", start=10, dur=20, shapes=[[8, 16], [16, 32]], dtypes=floats),
        op("aten::relu", start=40, dur=6, shapes=[[8, 32]], dtypes=["float"]),
        device=None,
    )
    times = operator_times(trace, step_ms=100)
    assert times.of("aten::mm", ((8, 16), (16, 32)), "float") == (20, "measured")
    assert times.of("aten::mm", ((16, 16), (16, 32)), "float") == (40, "scaled")
    assert times.of("aten::relu", ((16, 32),), "float") == (12, "scaled")
    unknown = times.of("aten::gelu", ((8, 32),), "float")
    assert unknown.basis == "guessed"
    assert unknown.ms == pytest.approx(6)  # as long as the other that moves as many bytes


def test_the_work_of_products_is_arithmetic_and_of_others_bytes() -> None:
    assert work_of("aten::mm", ((8, 16), (16, 32)), "float") == 2 * 8 * 16 * 32
    assert work_of("aten::addmm", ((32,), (8, 16), (16, 32)), "float") == 2 * 8 * 16 * 32
    assert work_of("aten::linear", ((8, 16), (32, 16)), "float") == 2 * 8 * 16 * 32
    assert work_of("aten::relu", ((8, 16),), "c10::Half") == 2 * 8 * 16
    assert tensor_shapes([[2, 3], [], [[4], [5, 6]]]) == ((2, 3), (4,), (5, 6))
