"""What-ifs on compiled steps, and compile itself against a compiled training."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benches import ask, bench_for
from explain.build import AUTOGRAD, kernel, note, op, step, write
from stepscope.trace.read import read_trace

if TYPE_CHECKING:
    from pathlib import Path

    from explain.build import Events
    from stepscope.predict.engine import Bench
    from stepscope.records.prediction import Prediction

EAGER, COMPILED = "gpt2s_b8_bf16_fused", "gpt2s_b8_bf16_compile"


class Recorded:
    """Recordings of one model, eager and compiled, each read once."""

    def __init__(self, folder: Path) -> None:
        truth = json.loads((folder / "truth.json").read_text())
        self.compiled_ms = float(truth[COMPILED]["step_ms_pipelined"])
        self._folder = folder
        self._benches: dict[str, Bench] = {}

    def predict(self, name: str, *settings: str) -> Prediction:
        if name not in self._benches:
            self._benches[name] = bench_for(read_trace(self._folder / f"{name}.json.gz"))
        return ask(self._benches[name], *settings)


@pytest.fixture(scope="module")
def recorded(shared: Path) -> Recorded:
    return Recorded(shared / "traces/h200")


def test_compile_is_promised_from_the_eager_trace(recorded: Recorded) -> None:
    """The host paces it, and was faster when the compiled step was timed."""
    found = recorded.predict(EAGER, "compile")
    assert found.predicted_ms == pytest.approx(recorded.compiled_ms, rel=0.25)
    assert found.low_ms < recorded.compiled_ms < found.high_ms


def test_the_fused_kernels_take_what_the_compiled_step_s_take(recorded: Recorded) -> None:
    """The device alone: nothing of it was fitted to the compiled trace."""
    promised = recorded.predict(EAGER, "compile").device_ms
    assert promised == pytest.approx(recorded.predict(COMPILED).device_ms, rel=0.05)


def test_what_is_assumed_counts_launches_and_bytes(recorded: Recorded) -> None:
    words, pace = recorded.predict(EAGER, "compile").assumptions
    assert "the compiled step is host-bound" in pace
    assert words.startswith("838 launches of both passes become ")
    assert "loops fuse" in words
    assert "GB less" in words


def test_bf16_and_compile_together_are_faster_than_either(recorded: Recorded) -> None:
    both = recorded.predict("gpt2s_b8_fp32", "precision=bf16", "compile")
    one = recorded.predict("gpt2s_b8_fp32", "precision=bf16")
    other = recorded.predict("gpt2s_b8_fp32", "compile")
    assert both.predicted_ms < one.predicted_ms
    assert both.predicted_ms < other.predicted_ms
    assert not both.refused


@pytest.mark.parametrize(
    ("setting", "slower", "faster"),
    [
        ("batch=x2", 1.1, 2.0),
        ("checkpoint=blocks", 1.05, 1.4),
        ("cuda-graphs", 0.7, 0.95),
        ("precision=fp8", 0.7, 1.5),
        ("accumulate=2", 1.5, 2.1),
    ],
)
def test_a_compiled_step_can_be_changed(
    recorded: Recorded, setting: str, slower: float, faster: float
) -> None:
    found = recorded.predict(COMPILED, setting)
    assert not found.refused
    assert slower < found.predicted_ms / found.baseline_ms < faster


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("compile", "compiled already"),
        ("precision=bf16", "no matmul runs in a wider dtype"),
        ("optimizer=fused", "fused already"),
        ("no-breaks", "no compiled graph that a break splits"),
        ("checkpoint=none", "this step recomputes nothing"),
        ("batch=16", "Give a factor"),
    ],
)
def test_what_does_not_apply_to_a_compiled_step_says_why(
    recorded: Recorded, setting: str, why: str
) -> None:
    found = recorded.predict(COMPILED, setting)
    assert [why in reason for reason in found.refused] == [True]
    assert found.predicted_ms == found.baseline_ms


def test_recomputing_in_compiled_code_has_no_price_per_block(recorded: Recorded) -> None:
    compiled, eager = (
        recorded.predict(name, "checkpoint=blocks") for name in (COMPILED, "gpt2s_b8_bf16")
    )
    added = [found.host_ms - found.baseline_ms for found in (compiled, eager)]
    assert added[0] < added[1] / 2
    assert "activation_memory_budget" in compiled.assumptions[0]
    assert "activation_memory_budget" not in eager.assumptions[0]


def _call(key: str) -> str:
    return f"## Call CompiledFxGraph {key} ##"


def _product(at: float) -> Events:
    """A launch and its kernel, 10 µs later on the device."""
    shapes: dict[str, Any] = {"shapes": [[64, 64], [64, 64]], "dtypes": ["float", "float"]}
    return [
        *op("aten::mm", start=at, dur=4, **shapes),
        *kernel("gemm", start=at + 12, dur=6, launched_at=at + 1),
    ]


def _split_step(number: int) -> list[Events]:
    """Two graphs of one function, 300 µs apart, and their backward, 100 µs apart."""
    at = 1000 * number
    first, second = at + 2, at + 1
    return [
        step(number, start=at, dur=1000),
        op("Torch-Compiled Region: 0/0", start=at + 1, dur=400),
        op("CompiledFunction", start=at + 10, dur=30, sequence=first, forward_thread=0),
        note(_call("a"), start=at + 12, dur=26),
        _product(at + 20),
        op("Torch-Compiled Region: 1/0", start=at + 335, dur=50),
        op("CompiledFunction", start=at + 337, dur=40, sequence=second, forward_thread=0),
        note(_call("b"), start=at + 338, dur=30),
        _product(at + 350),
        op(
            "CompiledFunctionBackward",
            start=at + 420,
            dur=40,
            thread=AUTOGRAD,
            sequence=second,
            forward_thread=1,
        ),
        note(_call("b-back"), start=at + 421, dur=38, thread=AUTOGRAD),
        op(
            "CompiledFunctionBackward",
            start=at + 558,
            dur=40,
            thread=AUTOGRAD,
            sequence=first,
            forward_thread=1,
        ),
        note(_call("a-back"), start=at + 559, dur=38, thread=AUTOGRAD),
    ]


def test_without_breaks_the_time_between_graphs_goes(tmp_path: Path) -> None:
    steps = [events for number in (1, 2, 3) for events in _split_step(number)]
    bench = bench_for(read_trace(write(tmp_path / "trace.json", *steps), cache=False))
    found = ask(bench, "no-breaks")
    assert not found.refused
    saved_ms = found.baseline_ms - found.predicted_ms
    assert 0.15 < saved_ms < 0.32  # of 0.3 ms between the forward graphs; the profiler's part stays
    assert "2 gaps between graphs closed" in found.assumptions[0]


def test_a_step_that_nobody_compiled_has_no_breaks(recorded: Recorded) -> None:
    assert "no compiled graph" in recorded.predict(EAGER, "no-breaks").refused[0]
