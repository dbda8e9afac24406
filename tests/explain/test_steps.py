"""Steps of a trace: marked, repeated, the last one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import stepscope
from stepscope import NotCapturedError
from stepscope.explain.explain_job import explain_job
from stepscope.records.explanation import RankExplanation, Step
from stepscope.step.steps import find_steps, step_of
from stepscope.step.work import find_work

from .build import (
    AUTOGRAD,
    ZERO_NS,
    Events,
    describing,
    frame,
    kernel,
    memcpy,
    note,
    op,
    step,
    write,
)
from .conftest import Explain, Read

# Steps by the profiler's marks, else by optimizer steps, else the window; and their cycles.


def named(rank: RankExplanation) -> list[tuple[str, int, int]]:
    """(name, start, dur) in µs of the test's clock."""
    return [
        (each.name, (each.start_ns - ZERO_NS) // 1000, each.dur_ns // 1000)
        for each in rank.steps.steps
    ]


def window(rank: RankExplanation) -> tuple[int, int]:
    steps = rank.steps
    return (steps.window_start_ns - ZERO_NS) // 1000, (steps.window_end_ns - ZERO_NS) // 1000


def test_steps_are_the_profilers_marks_in_order_of_time(explained: Explain) -> None:
    rank = explained(
        step(5, start=100, dur=90),
        step(4, start=0, dur=95),
        kernel("a", start=10, dur=5, launched_at=5),
    )
    assert rank.steps.source == "profiler"
    assert named(rank) == [("ProfilerStep#4", 0, 95), ("ProfilerStep#5", 100, 90)]


def test_the_devices_copies_of_step_marks_are_not_steps(explained: Explain) -> None:
    rank = explained(
        step(4, start=0, dur=95),
        describing("gpu_user_annotation", "ProfilerStep#4", start=3, dur=80),
        kernel("a", start=10, dur=5, launched_at=5),
    )
    assert named(rank) == [("ProfilerStep#4", 0, 95)]


def test_a_cycle_runs_from_a_steps_first_work_to_the_next_steps(explained: Explain) -> None:
    # host    [step 1: 0-40]       [step 2: 40-80]      [step 3: 80-120]
    # device     a 50-90 (late: launched in step 1)  b 130-150   c 170-190
    rank = explained(
        step(1, start=0, dur=40),
        step(2, start=40, dur=40),
        step(3, start=80, dur=40),
        kernel("a", start=50, dur=40, launched_at=10),
        kernel("b", start=130, dur=20, launched_at=50),
        kernel("b", start=150, dur=10, launched_at=70),
        kernel("c", start=170, dur=20, launched_at=90),
    )
    assert rank.steps.cycles_ns == (80_000, 40_000)
    assert window(rank) == (50, 170)
    assert rank.step_ms.profiled == 0.060  # the median of 80 and 40 µs
    assert rank.budget.basis == "cycles"


def test_work_belongs_to_the_step_whose_host_range_launched_it(explained: Explain) -> None:
    """Also from another thread, and work launched before the first step is in no cycle."""
    rank = explained(
        kernel("warm-up", start=-20, dur=5, launched_at=-30),
        step(1, start=0, dur=40),
        step(2, start=40, dur=40),
        kernel("a", start=10, dur=5, launched_at=1),
        kernel("bwd", start=60, dur=5, launched_at=41, thread=AUTOGRAD),
    )
    assert rank.steps.cycles_ns == (50_000,)
    assert window(rank) == (10, 60)


def test_a_last_step_that_launched_nothing_does_not_cost_the_cycles(explained: Explain) -> None:
    rank = explained(
        step(1, start=0, dur=40),
        step(2, start=40, dur=40),
        step(3, start=80, dur=1),
        kernel("a", start=10, dur=5, launched_at=1),
        kernel("a", start=55, dur=5, launched_at=41),
    )
    assert rank.steps.cycles_ns == (45_000,)


def test_a_step_without_work_between_others_leaves_no_cycles(explained: Explain) -> None:
    rank = explained(
        step(1, start=0, dur=40),
        step(2, start=40, dur=40),
        step(3, start=80, dur=40),
        kernel("a", start=10, dur=5, launched_at=1),
        kernel("a", start=90, dur=5, launched_at=81),
    )
    assert rank.steps.cycles_ns == ()
    assert rank.budget.basis == "window"
    assert "no-cycle" in {note.id for note in rank.quality}


def test_one_step_is_the_window(explained: Explain) -> None:
    # the step's host range is 40 µs, its device work ends 95 µs after it began
    rank = explained(
        step(1, start=0, dur=40),
        kernel("a", start=10, dur=5, launched_at=1),
        kernel("b", start=20, dur=85, launched_at=2),
    )
    assert rank.steps.cycles_ns == ()
    assert window(rank) == (10, 105)
    assert rank.step_ms.profiled == 0.095


def test_without_marks_steps_lie_between_the_ends_of_optimizer_steps(explained: Explain) -> None:
    rank = explained(
        note("Optimizer.step#AdamW.step", start=30, dur=10),
        note("Optimizer.step#AdamW.step", start=80, dur=10),
        note("Optimizer.step#AdamW.step", start=140, dur=10),
        note("Optimizer.zero_grad#AdamW.zero_grad", start=45, dur=1),
        kernel("a", start=50, dur=5, launched_at=42),
        kernel("a", start=100, dur=5, launched_at=92),
    )
    assert rank.steps.source == "optimizer"
    assert [(start, dur) for _, start, dur in named(rank)] == [(40, 50), (90, 60)]
    assert rank.steps.cycles_ns == (50_000,)
    assert "no-step-marks" in {note.id for note in rank.quality}


def test_one_optimizer_step_bounds_nothing(explained: Explain) -> None:
    rank = explained(
        note("Optimizer.step#SGD.step", start=30, dur=10),
        kernel("a", start=50, dur=5, launched_at=42),
        kernel("a", start=60, dur=5, launched_at=43),
    )
    assert rank.steps.source == "window"
    assert window(rank) == (50, 65)
    assert rank.step_ms.profiled == 0.015


def test_without_a_device_cycles_are_the_steps_themselves(explained: Explain) -> None:
    rank = explained(
        step(1, start=0, dur=38),
        step(2, start=40, dur=50),
        op("aten::mm", start=5, dur=20),
        op("aten::mm", start=45, dur=20),
        device=None,
    )
    assert rank.steps.cycles_ns == (40_000, 50_000)
    assert window(rank) == (0, 90)


def test_steps_without_any_work_are_still_listed(explained: Explain) -> None:
    rank = explained(step(1, start=0, dur=38), step(2, start=40, dur=50), device=None)
    assert len(named(rank)) == 2
    assert rank.timeline.span_ns == 0
    shares = {part.id: part.share for part in rank.budget.parts if part.share}
    assert shares == {"python": 1.0}  # the steps are there and no operator runs in them


def test_step_of_a_time_is_the_range_that_holds_it() -> None:
    steps = (Step(name="1", start_ns=10, dur_ns=5), Step(name="2", start_ns=20, dur_ns=5))
    times = np.array([9, 10, 14, 15, 19, 20, 24, 25])
    assert step_of(steps, times).tolist() == [-1, 0, 0, -1, -1, 1, 1, -1]


def test_on_a_cpu_a_last_step_without_the_others_update_is_the_end_of_the_training(
    explained: Explain,
) -> None:
    def trained(number: int, start: float) -> list[list[dict[str, object]]]:
        update = note("Optimizer.step#SGD.step", start=start + 50, dur=10)
        return [step(number, start=start, dur=100), op("aten::mm", start=start, dur=40), update]

    whole = [*trained(1, 0), *trained(2, 100)]
    ended = explained(*whole, step(3, start=200, dur=7), op("aten::item", start=201, dur=1))
    assert ended.steps.cycles_ns == (100_000, 100_000)
    assert len(ended.steps.steps) == 3
    assert len(explained(*whole, *trained(3, 200)).steps.cycles_ns) == 3


# A last step that the script did not finish is no step to average over.

NODE = "autograd::engine::evaluate_function: MmBackward0"


def three_steps(read: Read, *inside: list[Events]) -> int:
    """The number of steps that averages are taken over, on a CPU."""
    events: list[Events] = [step(n, start=100.0 * n, dur=100) for n in range(3)]
    events += [op("aten::mm", start=100.0 * n + 1, dur=20) for n in range(3)]
    trace = read(*events, *(one for some in inside for one in some))
    return len(find_steps(trace, find_work(trace)).cycles_ns)


def backward(number: int) -> Events:
    return op(NODE, start=100.0 * number + 30, dur=20)


def update(number: int, at: float) -> Events:
    return note("Optimizer.step#Adam.step", start=100.0 * number + at, dur=5)


@pytest.mark.parametrize(("last", "count"), [([], 2), ([backward(2)], 3)])
def test_without_marks_of_an_optimizer_its_backward_tells(
    read: Read, last: list[Events], count: int
) -> None:
    """A compiled optimizer step leaves no mark."""
    assert three_steps(read, [backward(0), backward(1)], last) == count


@pytest.mark.parametrize(("last", "count"), [([update(2, 30)], 2), ([], 2)])
def test_two_optimizers_must_both_have_stepped(read: Read, last: list[Events], count: int) -> None:
    both = [update(n, at) for n in range(2) for at in (30, 60)]
    assert three_steps(read, both, last) == count


def test_a_whole_last_step_counts(read: Read) -> None:
    assert three_steps(read, [update(n, at) for n in range(3) for at in (30, 60)]) == 3


# Steps of traces without marks: found by what repeats, or not at all. None is invented.

BACKWARD_NODE = "autograd::engine::evaluate_function: {}Backward0"


def forward(start: float, *layers: str) -> Events:
    """One operator and one kernel of 8 µs for each layer, 10 µs apart."""
    out: Events = []
    for place, layer in enumerate(layers):
        at = start + 10 * place
        out += op(f"aten::{layer}", start=at, dur=5)
        out += kernel(layer, start=at + 2, dur=8, launched_at=at + 1)
    return out


def backward_of(start: float, *layers: str) -> Events:
    out: Events = []
    for place, layer in enumerate(layers):
        at = start + 10 * place
        out += op(BACKWARD_NODE.format(layer), start=at, dur=5, thread=AUTOGRAD)
        out += kernel(layer, start=at + 2, dur=8, launched_at=at + 1, thread=AUTOGRAD)
    return out


def start_up(until: float, copies: int = 20) -> Events:
    """Weights go to the device, one after the other, long before `until`."""
    out: Events = []
    for place in range(copies):
        at = until - 100_000 + 1_000 * place
        out += op("aten::to", start=at, dur=500)
        out += memcpy(start=at + 10, dur=100, launched_at=at + 5, bytes=1000)
    return out


def updated(at: float) -> Events:
    return note("Optimizer.step#Adam.step", start=at, dur=5)


def lengths_us(rank: RankExplanation) -> list[float]:
    return [step.dur_ns / 1e3 for step in rank.steps.steps]


LAYERS = ("embed", "mm", "relu", "mm", "relu", "head")


def test_backward_passes_that_repeat_are_steps(explained: Explain) -> None:
    training: list[Events] = [start_up(0)]
    for number in range(5):
        at = 200 * number
        training += [forward(at, *LAYERS), backward_of(at + 60, "head", "mm", "mm")]
        training += [op("c10d::allreduce_", start=at + 66, dur=1, thread=AUTOGRAD)]  # a hook
        training += [op("aten::item", start=at + 150, dur=1)] if number == 2 else []  # a log
    rank = explained(*training)
    assert (rank.steps.source, rank.steps.repeats) == ("repeated", "backward passes")
    assert lengths_us(rank) == [200] * 4
    assert rank.step_ms.profiled == pytest.approx(0.2)  # start-up is no part of it
    (said,) = [one.detail for one in rank.quality if one.id == "no-step-marks"]
    assert "found by repeating backward passes" in said


def test_two_passes_that_take_turns_are_one_step(explained: Explain) -> None:
    """A GAN: with marks of the optimizers, and without."""
    bare: list[Events] = []
    marks: list[Events] = []
    for number in range(8):
        at, layers = 100 * number, ("d", "d", "d") if number % 2 else ("g", "d")
        bare += [forward(at, *layers), backward_of(at + 40, *layers)]
        marks += [updated(at + 80)]
    assert lengths_us(explained(*bare)) == [200] * 3
    marked = explained(*bare, *marks)
    assert marked.steps.source == "optimizer"
    assert lengths_us(marked) == [200] * 3


def test_passes_whose_gradients_add_up_are_one_step(explained: Explain) -> None:
    passes = [
        part
        for number in range(4)
        for part in (forward(100 * number, "mm"), backward_of(100 * number + 20, "mm"))
    ]
    rank = explained(*passes, updated(390))
    assert rank.steps.source != "repeated"
    assert len(rank.steps.steps) <= 1


def test_the_only_step_begins_with_its_forward_pass(explained: Explain) -> None:
    layers = [
        op("aten::mm", start=10 * place, dur=5, sequence=place, thread=100) for place in range(3)
    ]
    nodes = [
        op(
            BACKWARD_NODE.format("Mm"),
            start=50 + 10 * (2 - place),
            dur=5,
            sequence=place,
            forward_thread=1,
        )
        for place in range(3)
    ]
    rank = explained(start_up(0, 3), *layers, *nodes, forward(0, "x"), updated(90))
    assert rank.steps.source == "optimizer"
    assert lengths_us(rank) == [95]
    assert rank.step_ms.profiled is not None
    assert rank.step_ms.profiled < 0.1  # the copies of weights took 100 ms before it


def test_layers_of_one_forward_pass_are_no_steps(explained: Explain) -> None:
    """They repeat as steps do, whether modules, annotations or copies are in the trace or not."""
    layers = ("embed", *("norm", "mm") * 12, "norm", "head")
    once = forward(0, *layers)
    marks = [note("layer", start=10 * place, dur=20) for place in range(1, 24, 2)]
    modules = frame("nn.Module: GPT_0", start=-5, dur=400)
    for extra in ([], [start_up(0)], marks, [modules]):
        rank = explained(once, *extra)
        assert rank.steps.source == "window", extra


@pytest.mark.parametrize("sign", ["copies to the device", "calls of the model", "synchronisations"])
def test_a_loop_of_forward_passes_needs_a_sign(explained: Explain, sign: str) -> None:
    loop: list[Events] = [start_up(0)]
    for number in range(6):
        at = 100 * number
        loop += [forward(at, *LAYERS)]
        if sign == "copies to the device":
            loop += [memcpy(start=at - 8, dur=2, launched_at=at - 9, bytes=10)]
        elif sign == "calls of the model":
            loop += [frame("nn.Module: Net_0", start=at - 1, dur=70)]
        else:
            loop += [
                kernel(
                    "x", start=at + 70, dur=1, launched_at=at + 69, launch="cudaDeviceSynchronize"
                )
            ]
    rank = explained(*loop[1:])
    assert rank.steps.source == "repeated"
    assert rank.steps.repeats == sign
    assert lengths_us(rank)[:4] == [100] * 4
    assert explained(*[forward(100 * number, *LAYERS) for number in range(6)]).steps.is_span


def test_copies_of_weights_are_no_steps(explained: Explain) -> None:
    assert explained(start_up(0)).steps.is_span
    assert explained(start_up(0), forward(0, *LAYERS)).steps.is_span


def test_a_span_is_told_as_one_and_predicts_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "span.json", start_up(0), forward(0, *LAYERS))
    found = stepscope.explain(path, cache=False)
    assert found.verdict.startswith("No training steps found: The trace has no step marks. It cov")
    assert "100 ms" in found.verdict
    assert "prof.step()" in found.next
    assert "stepscope run" in found.next
    assert found.advice == ()
    text = " ".join([found.verdict, found.why, *(one.summary for one in found.findings)])
    assert "of the step" not in text
    assert {one.of for one in found.findings} <= {"trace", "memory", "run", "work"}
    assert not any(one.remedies for one in found.findings)
    with pytest.raises(NotCapturedError, match=r"no step to predict: call prof\.step\(\)"):
        stepscope.whatif(path, "cuda-graphs", cache=False)


def test_a_trace_with_marks_is_no_span(tmp_path: Path) -> None:
    path = write(
        tmp_path / "marked.json", forward(0, *LAYERS), note("ProfilerStep#1", start=-1, dur=80)
    )
    assert not explain_job(path).verdict.startswith("No training steps")


def test_the_report_says_what_repeats_or_that_nothing_does(tmp_path: Path) -> None:
    loop = [
        part
        for number in range(4)
        for part in (forward(100 * number, "mm"), backward_of(100 * number + 20, "mm"))
    ]
    span = write(tmp_path / "span.json", start_up(0), forward(0, *LAYERS))
    page = stepscope.write_report(span, tmp_path / "span.html", cache=False).read_text()
    assert "Time covered" in page
    assert "Step, profiled" not in page
    repeated = write(tmp_path / "repeated.json", *loop)
    page = stepscope.write_report(repeated, tmp_path / "repeated.html", cache=False).read_text()
    assert "found by repeating backward passes" in page
