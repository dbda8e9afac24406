"""Products with another batch: which of them the batch gives more blocks, and which longer ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from benches import ask, bench_for
from explain.build import AUTOGRAD, MAIN, kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.batch_size import count_layer_runs, find_calls_of_samples
from stepscope.predict.whatifs import predict_change
from stepscope.records.explanation import BatchReading
from stepscope.ui.topics.whatif import gain_of

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.engine import Bench

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
    tasks = predict_change("batch", bench_of(folder).context, batch).context.graph.tasks
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
    half = predict_change("batch", bench.context, "x0.5").context
    twice, once = (
        predict_change("batch", context, value).context.graph.tasks.dur_ns
        for context, value in ((half, "x0.5"), (bench.context, "x0.25"))
    )
    assert twice == pytest.approx(once)


def test_recurrent_layers_make_another_batch_doubtful(tmp_path: Path) -> None:
    """Libraries have other kernels for other numbers of rows."""
    plain, recurrent = (
        predict_change("batch", bench_of(tmp_path, name).context, "x2")
        for name in ("aten::mm", "aten::_cudnn_rnn")
    )
    layer, *others = recurrent.context.graph.tasks.dur_ns.tolist()
    more = 0.12 * layer / (layer + sum(others))
    assert recurrent.doubt == pytest.approx(math.hypot(plain.doubt, more))


def looping(folder: Path, runs: int) -> Bench:
    """A step on the CPU that runs one layer `runs` times, 100 us of Python before each."""
    events: list[dict[str, Any]] = []
    floats = {"dtypes": ["float", "float"]}
    for number in range(3):
        at = (140.0 * runs + 400) * number
        events += step(number, start=at, dur=140 * runs + 400)
        for _ in range(runs):
            at += 140
            shapes = [[1, 64], [64, 64]]
            events += op("aten::linear", start=at, dur=40, shapes=shapes, sequence=number, **floats)
        linked = {"sequence": number, "forward_thread": MAIN, "thread": AUTOGRAD}
        engine = "autograd::engine::evaluate_function: LinearBackward0"
        events += op(engine, start=at + 200, dur=60, **linked)
        events += op(
            "torch::autograd::AccumulateGrad", start=at + 300, dur=20, thread=AUTOGRAD,
            shapes=[[64, 64]], dtypes=["float"],
        )  # fmt: skip
    return bench_for(read_trace(write(folder / f"{runs}.json", events)))


def test_a_step_that_loops_over_a_layer_may_grow_by_calls_or_by_rows(tmp_path: Path) -> None:
    """One size does not tell which: the interval holds both, and promises nothing."""
    plain, loops = (looping(tmp_path, runs) for runs in (1, 100))
    assert count_layer_runs(plain.context) == 1
    assert count_layer_runs(loops.context) == 100
    prediction = ask(loops, "batch=x2")
    gain = gain_of(prediction)
    assert not gain.is_sure
    assert prediction.low_ms < 1.1 * prediction.baseline_ms
    assert prediction.high_ms > 1.7 * prediction.baseline_ms
    assert "100 times" in " ".join(prediction.assumptions)


def test_a_loop_inside_a_model_that_is_called_once_is_no_loop_over_samples(tmp_path: Path) -> None:
    """As RAFT refines its answer some times, each time for the whole batch."""
    loops = looping(tmp_path, 100)
    once = BatchReading(size=1, read_from="what RAFT is called with", calls=1)
    loops.context = replace(loops.context, batch=1, batch_reading=once)
    assert "100 times" not in " ".join(ask(loops, "batch=x2").assumptions)
    each_task = replace(once, calls=4)
    loops.context = replace(loops.context, batch_reading=each_task)
    assert "100 times" in " ".join(ask(loops, "batch=x2").assumptions)


BATCH, FLOATS = 16, {"dtypes": ["float", "float"]}


def on_cpu(folder: Path, calls: list[tuple[str, Any, float, float]], *, wide: int = 0) -> Bench:
    """A layer of 16 samples, then these calls: name, shapes, time, and Python before it. A table
    gets `wide` rows more in each step."""
    events: list[dict[str, Any]] = []
    at = 0.0
    for number in range(3):
        began = at
        inside: list[dict[str, Any]] = []
        layer = ("aten::linear", [[BATCH, 64], [64, 64]], 100.0, 10.0)
        for name, shapes, dur, gap in (layer, *calls):
            shapes = [[size + wide * number if size == 999 else size for size in s] for s in shapes]
            at += gap
            inside += op(name, start=at, dur=dur, shapes=shapes, sequence=number, **FLOATS)
            at += dur
        linked = {"sequence": number, "forward_thread": MAIN, "thread": AUTOGRAD}
        engine = "autograd::engine::evaluate_function: LinearBackward0"
        inside += op(engine, start=at + 10, dur=60, **linked)
        inside += op(
            "torch::autograd::AccumulateGrad", start=at + 80, dur=5, thread=AUTOGRAD,
            shapes=[[64, 64]], dtypes=["float"],
        )  # fmt: skip
        at += 100
        events += [*step(number, start=began, dur=at - began), *inside]
    return bench_for(read_trace(write(folder / "cpu.json", events)))


def grown(bench: Bench) -> list[float]:
    """Time before each call and in it, with twice the batch over with one."""
    before = bench.context.graph.calls
    after = predict_change("batch", bench.context, "x2").context.graph.calls
    ratios: list[float] = (
        (after.call_ns + after.gap_ns) / (before.call_ns + before.gap_ns)
    ).tolist()
    return ratios


def test_a_loop_over_samples_makes_twice_the_calls(tmp_path: Path) -> None:
    """Each sample is taken out of the batch, with Python before it."""
    bench = on_cpu(tmp_path, [("aten::select", [[BATCH, 2]], 5.0, 50.0)] * BATCH)
    assert int(find_calls_of_samples(bench.context).sum()) == BATCH
    assert grown(bench)[1 : 1 + BATCH] == pytest.approx([2.0] * BATCH, rel=0.02)


@pytest.mark.parametrize("count", [BATCH - 1, BATCH + 1])
def test_calls_that_do_not_come_as_often_as_samples_are_no_loop_over_them(
    tmp_path: Path, count: int
) -> None:
    bench = on_cpu(tmp_path, [("aten::select", [[BATCH, 2]], 5.0, 50.0)] * count)
    assert not find_calls_of_samples(bench.context).any()


def test_a_table_that_every_step_reads_whole_does_not_grow(tmp_path: Path) -> None:
    """As the graph of a recommender; a batch of graphs has other rows in every step."""
    table = [("aten::mm", [[999, 999], [999, 8]], 2000.0, 10.0)]
    assert grown(on_cpu(tmp_path, table))[1] < 1.1
    assert grown(on_cpu(tmp_path, table, wide=7))[1] > 1.7
