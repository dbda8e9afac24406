"""Steps of traces without marks: found by what repeats, or not at all. None is invented."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import stepscope
from stepscope import NotCapturedError
from stepscope.explain.explain_job import explain_job

from .build import AUTOGRAD, Events, frame, kernel, memcpy, note, op, write

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.explanation import RankExplanation

    from .conftest import Explain

NODE = "autograd::engine::evaluate_function: {}Backward0"


def forward(start: float, *layers: str) -> Events:
    """One operator and one kernel of 8 µs for each layer, 10 µs apart."""
    out: Events = []
    for place, layer in enumerate(layers):
        at = start + 10 * place
        out += op(f"aten::{layer}", start=at, dur=5)
        out += kernel(layer, start=at + 2, dur=8, launched_at=at + 1)
    return out


def backward(start: float, *layers: str) -> Events:
    out: Events = []
    for place, layer in enumerate(layers):
        at = start + 10 * place
        out += op(NODE.format(layer), start=at, dur=5, thread=AUTOGRAD)
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
        training += [forward(at, *LAYERS), backward(at + 60, "head", "mm", "mm")]
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
        bare += [forward(at, *layers), backward(at + 40, *layers)]
        marks += [updated(at + 80)]
    assert lengths_us(explained(*bare)) == [200] * 3
    marked = explained(*bare, *marks)
    assert marked.steps.source == "optimizer"
    assert lengths_us(marked) == [200] * 3


def test_passes_whose_gradients_add_up_are_one_step(explained: Explain) -> None:
    passes = [
        part
        for number in range(4)
        for part in (forward(100 * number, "mm"), backward(100 * number + 20, "mm"))
    ]
    rank = explained(*passes, updated(390))
    assert rank.steps.source != "repeated"
    assert len(rank.steps.steps) <= 1


def test_the_only_step_begins_with_its_forward_pass(explained: Explain) -> None:
    layers = [
        op("aten::mm", start=10 * place, dur=5, sequence=place, thread=100) for place in range(3)
    ]
    nodes = [
        op(NODE.format("Mm"), start=50 + 10 * (2 - place), dur=5, sequence=place, forward_thread=1)
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
        for part in (forward(100 * number, "mm"), backward(100 * number + 20, "mm"))
    ]
    span = write(tmp_path / "span.json", start_up(0), forward(0, *LAYERS))
    page = stepscope.write_report(span, tmp_path / "span.html", cache=False).read_text()
    assert "Time covered" in page
    assert "Step, profiled" not in page
    repeated = write(tmp_path / "repeated.json", *loop)
    page = stepscope.write_report(repeated, tmp_path / "repeated.html", cache=False).read_text()
    assert "found by repeating backward passes" in page
