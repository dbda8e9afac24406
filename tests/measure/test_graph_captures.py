"""What a CUDA graph records while it is captured, with a graph that only pretends to be one."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stepscope.explain.flops.call import Call
from stepscope.explain.flops.prices import price_call
from stepscope.measure.cuda_graphs import GraphCaptures
from stepscope.measure.folder import GRAPHS
from stepscope.measure.never_raise import forget_problems, problems
from stepscope.measure.patches import attaching, detach
from stepscope.trace.run_folder.compiler_record import read_captures

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stepscope.records.compiled import CapturedGraph


class FakeGraph:
    """As torch.cuda.graph: a context that begins and ends a capture."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __enter__(self) -> None:
        self.events.append("begin")

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.events.append("end" if kind is None else kind.__name__)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GraphCaptures, type[FakeGraph]]]:
    """Attached to a module of our own instead of torch.cuda.graphs."""
    graph = type("graph", (FakeGraph,), {})
    module = ModuleType("torch.cuda.graphs")
    module.graph = graph  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", module)
    forget_problems()
    found = GraphCaptures()
    with attaching() as layer:
        found.attach()
    yield found, graph
    detach(layer)
    assert "__enter__" not in vars(graph)
    assert not problems()


def written(found: GraphCaptures, folder: Path) -> tuple[CapturedGraph, ...]:
    found.write(folder)
    graphs, notes = read_captures(folder)
    assert not notes
    return graphs


def test_operators_are_recorded_in_order_with_shapes_and_passes(
    captures: tuple[GraphCaptures, type[FakeGraph]], tmp_path: Path
) -> None:
    found, graph = captures
    weight = torch.randn(8, 4, requires_grad=True)
    given = torch.randn(3, 8)
    torch.mm(given, weight)  # outside: not recorded
    with graph():
        torch.relu(torch.mm(given, weight)).sum().backward()
    (capture,) = written(found, tmp_path)
    names = [one.name for one in capture.operators]
    assert [name for name in names if "detach" not in name][:3] == [
        "aten::mm",
        "aten::relu",
        "aten::sum",
    ]
    product = capture.operators[0]
    assert product.shapes == [[3, 8], [8, 4]]
    assert product.dtypes == ["float", "float"]
    assert not product.backward
    backward = [one.name for one in capture.operators if one.backward]
    assert {"aten::threshold_backward", "aten::mm"} <= set(backward)


def test_recorded_products_can_be_priced(
    captures: tuple[GraphCaptures, type[FakeGraph]], tmp_path: Path
) -> None:
    found, graph = captures
    with graph():
        torch.addmm(torch.zeros(4), torch.ones(3, 8), torch.ones(8, 4))
    (capture,) = written(found, tmp_path)
    product = next(one for one in capture.operators if one.name == "aten::addmm")
    call = Call(product.name, product.shapes, product.dtypes, product.concrete)
    assert price_call(call).flops == 2 * 3 * 8 * 4


def test_the_training_computes_the_same(captures: tuple[GraphCaptures, type[FakeGraph]]) -> None:
    _, graph = captures
    given = torch.randn(5, 7)
    with graph():
        recorded = torch.nn.functional.softmax(given * 2, dim=-1)
    assert torch.equal(recorded, torch.nn.functional.softmax(given * 2, dim=-1))


def test_compiled_functions_stay_compiled_inside_a_capture(
    captures: tuple[GraphCaptures, type[FakeGraph]], tmp_path: Path
) -> None:
    """Dynamo runs functions uncompiled below a dispatch mode, unless the mode says otherwise."""
    found, graph = captures
    runs = []

    def backend(module: Any, _inputs: Any) -> Any:
        def compiled(*args: Any) -> Any:
            runs.append(len(args))
            return module(*args)

        return compiled

    function = torch.compile(lambda x: torch.relu(x @ x) * 2, backend=backend)
    given = torch.ones(4, 4)
    function(given)
    with graph():
        function(given)
    assert len(runs) == 2
    (capture,) = written(found, tmp_path)
    assert "aten::mm" in [one.name for one in capture.operators]


def test_without_a_way_to_keep_functions_compiled_nothing_is_recorded(
    captures: tuple[GraphCaptures, type[FakeGraph]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, graph = captures
    monkeypatch.setattr("stepscope.measure.cuda_graphs.has_compiled", lambda: True)
    monkeypatch.delattr("torch.utils._python_dispatch.TorchDispatchMode.ignore_compile_internals")
    with graph():
        torch.ones(2)
    assert written(found, tmp_path) == ()


def test_an_error_inside_a_capture_passes_and_ends_the_recording(
    captures: tuple[GraphCaptures, type[FakeGraph]], tmp_path: Path
) -> None:
    found, graph = captures
    one = graph()
    with pytest.raises(RuntimeError), one:
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert one.events == ["begin", "RuntimeError"]
    with graph():
        torch.ones(2)
    assert [[op.name for op in g.operators] for g in written(found, tmp_path)] == [["aten::ones"]]


def test_without_a_trace_nothing_is_recorded(
    captures: tuple[GraphCaptures, type[FakeGraph]], tmp_path: Path
) -> None:
    found, graph = captures
    found.is_wanted = False
    with graph():
        torch.ones(2)
    assert written(found, tmp_path) == ()
    assert not (tmp_path / GRAPHS).exists()


def test_a_damaged_line_is_noted_and_the_others_are_read(
    captures: tuple[GraphCaptures, type[FakeGraph]], tmp_path: Path
) -> None:
    found, graph = captures
    with graph():
        torch.ones(2)
    found.write(tmp_path)
    file = tmp_path / GRAPHS
    file.write_text('{"what": "capture", "operators": "!!"}\n' + file.read_text())
    graphs, notes = read_captures(tmp_path)
    assert len(graphs) == 1
    assert "capture's operators" in notes[0].detail


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a real graph is captured")
def test_a_real_graph_replays_what_it_recorded(tmp_path: Path) -> None:
    found = GraphCaptures()
    with attaching() as layer:
        found.attach()
    try:
        model = torch.nn.Linear(64, 64, device="cuda")
        given = torch.randn(8, 64, device="cuda")
        callable_ = torch.cuda.make_graphed_callables(model, (given,))
        callable_(given).sum().backward()
        torch.cuda.synchronize()
    finally:
        detach(layer)
    forward, backward = written(found, tmp_path)
    assert "aten::addmm" in [one.name for one in forward.operators]
    assert "aten::mm" in [one.name for one in backward.operators]


def test_a_list_that_begins_without_a_tensor_is_described_by_its_tensors(
    captures: tuple[GraphCaptures, type[FakeGraph]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its text would read the values, which waits for the device."""
    found, graph = captures
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda _tensor: pytest.fail("read"))
    given, places = torch.randn(3, 8), torch.tensor([0, 2])
    with graph():
        given[:, places]
    (capture,) = written(found, tmp_path)
    (row,) = [one for one in capture.operators if one.name == "aten::index"]
    assert row.shapes[1] == [[2]]
    assert row.dtypes[1] == "TensorList"
