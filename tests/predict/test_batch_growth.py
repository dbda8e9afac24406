"""Products with another batch: which of them the batch gives more blocks, and which longer ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benches import bench_for
from explain.build import AUTOGRAD, MAIN, kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.whatifs import WHATIFS

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.whatif import Bench

# 4096 tokens through a square layer of 1024: 128 blocks on 132 multiprocessors.
TOKENS, WIDTH = 4096, 1024
GRID = [128, 1, 1]


def bench_of(folder: Path, name: str = "aten::mm") -> Bench:
    """The layer, the gradient of its input and that of its weight, each of 202 us."""
    events: list[dict[str, Any]] = []
    forward, weight = [[TOKENS, WIDTH], [WIDTH, WIDTH]], [[WIDTH, TOKENS], [TOKENS, WIDTH]]
    floats = {"dtypes": ["float", "float"]}
    for number in range(3):
        at = 4000.0 * number
        events += step(number, start=at, dur=4000)
        events += op(name, start=at, dur=40, shapes=forward, sequence=number, **floats)
        events += kernel("gemm", start=at + 20, dur=202, launched_at=at + 5, grid=GRID)
        at += 500
        linked = {"sequence": number, "forward_thread": MAIN, "thread": AUTOGRAD}
        engine = "autograd::engine::evaluate_function: MmBackward0"
        events += op(engine, start=at, dur=900, **linked)
        for place, shapes in enumerate((forward, weight)):
            begin = at + 10 + 400 * place
            events += op("aten::mm", start=begin, dur=40, thread=AUTOGRAD, shapes=shapes, **floats)
            events += kernel(
                "gemm", start=begin + 20, dur=202, launched_at=begin + 5, thread=AUTOGRAD, grid=GRID
            )
        events += op(
            "torch::autograd::AccumulateGrad", start=at + 950, dur=20, thread=AUTOGRAD,
            shapes=[[WIDTH, WIDTH]], dtypes=["float"],
        )  # fmt: skip
    return bench_for(read_trace(write(folder / "made.json", events, device="NVIDIA H200")))


def products_us(folder: Path, batch: str) -> list[float]:
    tasks = WHATIFS["batch"].apply(bench_of(folder).context, batch).context.graph.tasks
    found: list[float] = (tasks.dur_ns / 1e3).tolist()
    return found


def test_a_weights_gradient_takes_as_much_longer_as_there_are_more_samples(tmp_path: Path) -> None:
    """It sums over them. The others get more blocks: from 0.97 waves to 1.94, and a tail."""
    layer, of_input, of_weight = products_us(tmp_path, "x2")
    waves = (2 * 128 / 132 + 0.4) / (128 / 132 + 0.4)
    assert [layer, of_input] == pytest.approx([2 + 200 * waves] * 2)
    assert of_weight == pytest.approx(2 + 200 * 2)


def test_with_fewer_samples_smaller_blocks_fill_the_device_again(tmp_path: Path) -> None:
    """64 blocks would leave half of it idle. 128 of half the size take half as long, and what they
    cost more: so much that they were not taken with all the samples."""
    layer, of_input, of_weight = products_us(tmp_path, "x0.5")
    dearer = 2 * (128 / 132 + 0.4) / (256 / 132 + 0.4)
    assert dearer > 1.15
    assert [layer, of_input] == pytest.approx([2 + 200 * dearer / 2] * 2)
    assert of_weight == pytest.approx(2 + 200 / 2)


def test_half_and_half_again_is_a_quarter(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    half = WHATIFS["batch"].apply(bench.context, "x0.5").context
    twice, once = (
        WHATIFS["batch"].apply(context, value).context.graph.tasks.dur_ns
        for context, value in ((half, "x0.5"), (bench.context, "x0.25"))
    )
    assert twice == pytest.approx(once)


def test_recurrent_layers_make_another_batch_doubtful(tmp_path: Path) -> None:
    """Libraries have other kernels for other numbers of rows."""
    for name, doubt in (("aten::mm", 0.0), ("aten::_cudnn_rnn", 0.12)):
        outcome = WHATIFS["batch"].apply(bench_of(tmp_path, name).context, "x2")
        layer, *others = outcome.context.graph.tasks.dur_ns.tolist()
        assert outcome.doubt == pytest.approx(doubt * layer / (layer + sum(others)))
