"""What is no product under autocast: narrow, mixed or fp32, by the captured graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from benches import analyse
from explain.build import AUTOGRAD, MAIN, kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.autocast import retime_elements
from stepscope.predict.engine import Bench
from stepscope.predict.operator_library import ProbedStep
from stepscope.predict.step_operators import find_step_operators
from stepscope.predict.whatifs import precision, predict_change
from stepscope.records.memory import CapturedBackward, CapturedMemory
from stepscope.records.rank import MemoryInputs

if TYPE_CHECKING:
    from pathlib import Path

FLOAT = "float32"
STEP_US, KERNEL_US = 4000.0, 102.0  # 2 us to start
VECTORIZED = "void at::native::vectorized_elementwise_kernel<4>"
STRIDED = "void at::native::elementwise_kernel<128, 2>"
# Name, kernel, node and what the node reads: (node, output) or -1 for what needs no gradient.
OPERATORS = (
    ("aten::mm", "gemm", "MmBackward0", (-1,)),
    ("aten::relu", VECTORIZED, "ReluBackward0", (0,)),
    ("aten::mul", STRIDED, "MulBackward0", (1, 0)),
    ("aten::exp", VECTORIZED, "ExpBackward0", (1,)),
    ("aten::mul", STRIDED, "MulBackward0", (1, 3)),
    ("aten::gather", "vectorized_gather_kernel", "IndexSelectBackward0", (1,)),
    ("aten::add", VECTORIZED, "AddBackward0", (3, 4)),
)
GRAPH: dict[str, Any] = {
    "modules": [["", "Net", 1, False]],
    "storages": [],
    "nodes": [
        [node, 0, [[1024 * 1024, FLOAT]], [[maker, 0] for maker in makers], []]
        for _, _, node, makers in OPERATORS
    ],
}


def bench(folder: Path, captured: dict[str, Any] = GRAPH) -> Bench:
    events: list[dict[str, Any]] = []
    shapes = {"shapes": [[1024, 1024], [1024, 1024]], "dtypes": ["float", "float"]}
    for number in range(3):
        at = number * STEP_US
        events += step(number, start=at, dur=STEP_US)
        for place, (name, called, _, _) in enumerate(OPERATORS):
            at += 200
            second = "long int" if name == "aten::gather" else "float"
            given = shapes | {"dtypes": ["float", second]}
            events += op(name, start=at, dur=90, sequence=10 * number + place, **given)
            events += kernel(called, start=at + 20, dur=KERNEL_US, launched_at=at + 5)
        for place, (_, called, node, _) in reversed(list(enumerate(OPERATORS))):
            at += 200
            linked = {"sequence": 10 * number + place, "forward_thread": MAIN, "thread": AUTOGRAD}
            events += op(node, start=at, dur=90, **linked)
            inner = "aten::index_add_" if "gather" in called else "aten::mul"
            events += op(inner, start=at + 2, dur=80, thread=AUTOGRAD, **shapes)
            events += kernel(
                called, start=at + 20, dur=KERNEL_US, launched_at=at + 5, thread=AUTOGRAD
            )
    trace = read_trace(write(folder / "made.json", events, device="NVIDIA H200"))
    graph = msgspec.convert(captured, CapturedBackward)
    memory = MemoryInputs(captured=CapturedMemory(device="cuda", graph=graph))
    return Bench(analyse(trace, memory=memory))


def factors(made: Bench) -> list[float]:
    """Of all kernels, forward's first: new time over the old one, without the start."""
    context = made.context
    every = np.ones(len(context.graph.tasks), np.bool_)
    after = retime_elements(context, context.graph, every, every).tasks.dur_ns
    return ((after - 2_000) / (context.graph.tasks.dur_ns - 2_000)).round(3).tolist()


def test_what_reads_and_writes_narrow_values_alone_becomes_shorter(tmp_path: Path) -> None:
    _, relu, product, exponent, mixed, gather, add = factors(bench(tmp_path))[: len(OPERATORS)]
    assert relu == 0.5
    assert product == 0.8  # strided kernels are not bound by bytes alone
    assert exponent == 1.0  # in fp32
    assert mixed == 1.3  # it casts what it reads
    assert gather == 1.0  # one block for each row, whatever is in it
    assert add == 1.0  # all fp32


def test_a_product_sums_its_bias_in_the_narrow_dtype(tmp_path: Path) -> None:
    """Its weight is fp32 and cast before: what runs inside of it, here its first kernel, reads no
    fp32 value."""
    graph = {**GRAPH, "nodes": [*GRAPH["nodes"], ["AccumulateGrad", -1, [[1024, FLOAT]], [], []]]}
    graph["nodes"][0] = [*GRAPH["nodes"][0][:3], [[-1, 0], [len(OPERATORS), 0]], []]
    assert factors(bench(tmp_path, graph))[0] == 0.5


def test_backward_follows_the_operator_that_created_it(tmp_path: Path) -> None:
    add, gather, mixed, exponent, product, relu, _ = factors(bench(tmp_path))[len(OPERATORS) :]
    assert (add, mixed, exponent, product, relu) == (1.0, 1.3, 1.0, 0.8, 0.5)
    assert gather == 1.0  # adds by index take as long for each row


def test_calls_know_how_wide_what_they_read_would_be(tmp_path: Path) -> None:
    """By the graph's edges, whatever was computed last in that shape."""
    calls = find_step_operators(bench(tmp_path).context).calls
    widths = {place: calls[place].widths for place in (2, 4, 5)}
    assert widths == {2: (2, 2), 4: (2, 4), 5: (2, 0)}


def test_what_cancels_out_is_in_doubt(tmp_path: Path) -> None:
    """Some tasks gain what others lose: the step does not show how much was modelled."""
    outcome = predict_change("precision", bench(tmp_path).context, "bf16")
    assert outcome.doubt > 0.01


def test_the_hosts_cost_is_the_mean_of_what_was_probed_and_what_casts_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(tmp_path)
    items = len(made.context.graph.tasks)

    def added_ns(probed: ProbedStep | None) -> float:
        monkeypatch.setattr(precision, "find_probed", lambda *_: (probed, ""))
        outcome = predict_change("precision", made.context, "bf16")
        return outcome.context.graph.host_ns - made.context.graph.host_ns

    nothing_added = ProbedStep(
        factor=np.ones(items), known=np.zeros(items, np.bool_), probed_share=1.0,
        remembered_share=0.0, disagreement=0.0, error=0.0, host_added_ns=0.0,
    )  # fmt: skip
    assert added_ns(nothing_added) == pytest.approx(added_ns(None) / 2)


def test_batch_norm_takes_longer_than_cudnns(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    for number in range(3):
        at = number * STEP_US
        events += step(number, start=at, dur=STEP_US)
        shapes = {"shapes": [[8, 64, 56, 56], [64]], "dtypes": ["float", "float"]}
        events += op("aten::cudnn_batch_norm", start=at, dur=90, **shapes)
        events += kernel("bn", start=at + 20, dur=KERNEL_US, launched_at=at + 5)
    made = Bench(analyse(read_trace(write(tmp_path / "norm.json", events, device="NVIDIA H200"))))
    graph, nothing = made.context.graph, np.zeros(1, np.bool_)
    after = retime_elements(made.context, graph, nothing, nothing).tasks.dur_ns
    assert after[0] / graph.tasks.dur_ns[0] == pytest.approx(1.67)
