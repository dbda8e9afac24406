"""What-ifs of steps that compute on a CPU: blocks run again, the optimizer at a CPU's own cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benches import ask, bench_for
from stepscope.errors import UsageError
from stepscope.predict.other_gpu import retime
from stepscope.predict.other_gpu.gpu import find_gpu
from stepscope.predict.step_context import ADAGRAD, ADAM, MOMENTUM
from stepscope.step.graph import Phase
from stepscope.trace.read import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepscope.predict.engine import Bench

STEP_US, STEPS = 10_000, 3
BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"


def row(name: str, start: float, dur: float, shapes: Any = None, kind: str = "cpu_op") -> Any:
    event = {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": dur}
    args = {"Input Dims": shapes, "Input type": ["float"] * len(shapes)} if shapes else {}
    return event | {"args": args}


def training(optimizer: str, *, ends_early: bool = False) -> list[Any]:
    """Three blocks of two products; the last marked step may be cut off by the program's end."""
    up, down = [[32, 64], [256, 64], [256]], [[32, 256], [64, 256], [64]]
    events: list[Any] = []
    for number in range(STEPS):
        at = number * STEP_US
        events.append(row(f"ProfilerStep#{number}", at, STEP_US, kind="user_annotation"))
        for block in range(3):
            events.append(row("aten::linear", at + 500 * block, 200, up))
            events.append(row("aten::linear", at + 500 * block + 200, 200, down))
        events += [row(BACKWARD, at + 2000 + 500 * block, 400, down) for block in range(3)]
        name = f"Optimizer.step#{optimizer}.step"
        events.append(row(name, at + 4000, 4000, kind="user_annotation"))
        shapes = ([256, 64], [256], [64, 256], [64])
        events += [
            row("aten::mul_", at + 4000 + 100 * place, 20, [shape, []])
            for place, shape in enumerate(shapes)
        ]
    if ends_early:
        last = f"ProfilerStep#{STEPS}"
        events.append(row(last, STEPS * STEP_US, 40, kind="user_annotation"))
    return events


@pytest.fixture
def bench(write_trace: Callable[..., Path]) -> Callable[..., Bench]:
    def made(optimizer: str = "AdamW", **how: bool) -> Bench:
        return bench_for(read_trace(write_trace(training(optimizer, **how))))

    return made


def test_blocks_run_again_on_a_cpu(bench: Callable[..., Bench]) -> None:
    made = bench()
    found = ask(made, "checkpoint=blocks")
    assert not found.refused
    assert "6 calls of the blocks' forward pass (1.20 ms) run again" in found.assumptions[0]
    # And Python's own cost of three blocks in both passes.
    added_ms = found.predicted_ms - found.baseline_ms
    assert added_ms == pytest.approx(1.2 + 3 * (0.19 + 0.33), rel=0.35)


def test_a_cpu_step_without_recomputation_has_none_to_stop(bench: Callable[..., Bench]) -> None:
    found = ask(bench(), "checkpoint=none")
    assert found.refused == ("checkpoint=none: this step recomputes nothing",)


def test_the_batch_is_read_from_the_last_step_that_trains(bench: Callable[..., Bench]) -> None:
    assert bench(ends_early=True).context.batch == bench().context.batch == 32


def test_a_cpu_has_no_tf32(bench: Callable[..., Bench]) -> None:
    found = ask(bench(), "precision=tf32")
    assert found.refused == ("precision=tf32: the trace has no GPU, and a CPU has no TF32",)


def test_large_tensors_gain_less_from_a_fused_update_on_a_cpu() -> None:
    """A few large tensors are bound by their elements, many small ones by their calls."""

    def gain(forms: Any, tensors: int, elements: int) -> float:
        return float(
            forms["loop"].host_us(tensors, elements) / forms["fused"].host_us(tensors, elements)
        )

    assert gain(ADAM.cpu_forms, 100, 6400) > 5
    assert gain(ADAM.cpu_forms, 2, 8_000_000) == pytest.approx(1.86, abs=0.05)
    assert gain(MOMENTUM.cpu_forms, 2, 8_000_000) < gain(ADAM.cpu_forms, 2, 8_000_000)


@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad"])
def test_a_fused_update_on_a_cpu_says_what_it_rests_on(
    optimizer: str, bench: Callable[..., Bench]
) -> None:
    made = bench(optimizer)
    found = ask(made, "optimizer=fused")
    calls = made.context.graph.calls
    assert (calls.phase == Phase.OPTIMIZER).any()
    assert not any("H200" in line for line in found.assumptions)
    assert found.refused or "on one core of an ARM server" in " ".join(found.assumptions)


def test_a_shape_without_elements_is_refused() -> None:
    with pytest.raises(UsageError, match="Give sides above 0"):
        retime(op="bmm", shape=(8, 0, 64, 64), dtype="fp32", ms=1.0, source="T4", target="L4")
    padded = retime(
        op="conv", shape=(8, 64, 64, 3, 56, 1, 0), dtype="fp32", ms=1.0, source="T4", target="L4"
    )
    assert padded[0] > 0


def test_an_unknown_gpu_is_answered_with_names_that_begin_like_it() -> None:
    with pytest.raises(UsageError, match="did you mean H100"):
        find_gpu("H10")


def test_adagrad_is_fused_on_cpus_only() -> None:
    assert (ADAGRAD.fused, ADAGRAD.fused_on_cpu) == (False, True)
