"""What a CUDA graph records while it is captured, with a graph that only pretends to be one."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from stepscope.explain.flops.call import Call
from stepscope.explain.flops.prices import price_call
from stepscope.measure.cluster.flight_recorder import recorders
from stepscope.measure.cuda_graphs import CaptureGate, GraphCaptures, gate
from stepscope.measure.folder import GRAPHS
from stepscope.measure.never_raise import forget_problems, problems
from stepscope.measure.patches import attaching, detach
from stepscope.measure.session import special_steps
from stepscope.measure.session.special_steps import HostStep
from stepscope.measure.session.trial import TrialLog
from stepscope.measure.steps.phases import ENDED
from stepscope.measure.steps.step_times import DeviceClock, StepLines, StepMeter
from stepscope.measure.watch import watch
from stepscope.records.compiled import CapturedGraph
from stepscope.trace.run_folder.compiler_record import read_captures


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
    captures: tuple[GraphCaptures, type[FakeGraph]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    captures: tuple[GraphCaptures, type[FakeGraph]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


# Steps of a training that a CUDA graph replays, with a graph that runs its function on the CPU.


class FakeCUDAGraph:
    """As torch.cuda.CUDAGraph."""

    function: Callable[[], Any]

    def capture_begin(self, pool: Any = None) -> None:
        """Everything that is called until capture_end is recorded."""

    def capture_end(self) -> None:
        """The recording is complete."""

    def replay(self) -> None:
        """As the device would: nothing of it is seen by Python's hooks."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[FakeCUDAGraph]:
    graph = type("CUDAGraph", (FakeCUDAGraph,), {})
    module = ModuleType("torch.cuda.graphs")
    module.CUDAGraph = graph  # type: ignore[attr-defined]
    module.graph = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", module)
    return graph


def train(graph: FakeCUDAGraph, *, with_optimizer: bool, replays: int) -> None:
    """Two eager steps, a capture, and replays."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*, updates: bool) -> None:
        model(torch.ones(2, 4)).sum().backward()
        if updates:
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(updates=True)
    graph.capture_begin()
    step(updates=with_optimizer)
    graph.capture_end()
    for _ in range(replays):
        graph.replay()


def steps_of(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("rank-*/steps.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in rows if "last" not in row]


@pytest.mark.parametrize(("with_optimizer", "steps"), [(True, 7), (False, 2)])
def test_replays_of_an_optimizers_step_are_steps_and_its_capture_is_none(
    graphs: type[FakeCUDAGraph], tmp_path: Path, with_optimizer: bool, steps: int
) -> None:
    with watch(tmp_path / "run", step_on="auto", wait=100) as run:
        train(graphs(), with_optimizer=with_optimizer, replays=5)
    rows = steps_of(run.folder)
    assert [row["step"] for row in rows] == list(range(steps))
    assert "capture_begin" not in vars(graphs)
    assert not [one for one in problems() if "graph steps" in str(one)]


# While a CUDA graph is captured, nothing of ours touches the device, in any thread.


class Graph:
    """What a capture is known by."""


class Device:
    """Notes every call that CUDA refuses during a capture; the current stream captures nothing."""

    def __init__(self) -> None:
        self.touched: list[str] = []
        self.alive = 0

    def touch(self, name: str, result: Any = None) -> Any:
        self.touched.append(name)
        return result

    def is_initialized(self) -> bool:
        return True

    def current_stream(self) -> None:
        """Recording an event takes it when none is given."""

    def Event(self, **_: Any) -> Event:  # noqa: N802
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        device.alive += 1

    def __del__(self) -> None:
        self._device.alive -= 1

    def record(self, _stream: Any = None) -> None:
        self._device.touch("record")

    def query(self) -> bool:
        return bool(self._device.touch("query", True))

    def elapsed_time(self, _end: Event) -> float:
        return float(self._device.touch("elapsed_time", 0.25))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.touch("synchronize"))
    return made


@pytest.fixture
def capture() -> Iterator[Graph]:
    graph = Graph()
    gate.begin(graph)
    yield graph
    gate.end(graph)


def ended(number: int, events: Any) -> Any:
    return (ENDED, 1000 * (number + 1), (number, 0, False, events, (), False, None))


def test_events_are_read_only_when_no_graph_is_captured(device: Device) -> None:
    lines, graph = StepLines(0), Graph()
    clock = DeviceClock(device)
    assert clock.mark() is None
    pair = clock.mark()
    device.touched.clear()
    gate.begin(graph)
    assert lines([ended(0, pair)]) == []
    assert clock.mark() is None
    assert device.touched == []
    gate.end(graph)
    (line,) = lines([])
    assert json.loads(line)["device_ns"] == 250_000
    assert device.touched == ["query", "elapsed_time"]


def test_a_step_with_a_capture_in_it_has_no_device_time(device: Device) -> None:
    clock, graph = DeviceClock(device), Graph()
    clock.mark()
    gate.begin(graph)
    clock.mark()
    gate.end(graph)
    assert clock.mark() is None
    assert clock.mark() is not None


def test_events_that_were_read_stay_alive_during_a_capture(device: Device) -> None:
    lines, graph = StepLines(0), Graph()
    pairs = [(Event(device), Event(device)) for _ in range(2)]
    assert len(lines([ended(0, pairs.pop(0))])) == 1
    gate.begin(graph)
    assert lines([ended(1, pairs.pop())]) == []
    gc.collect()
    assert device.alive == 4
    gate.end(graph)
    assert len(lines([])) == 1
    assert device.alive == 2


def test_nothing_waits_reads_or_copies_during_a_capture(
    device: Device, capture: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(special_steps, "has_compiled", lambda: False)
    step = HostStep(fine=True, alone=True)
    step.begin()
    torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))(torch.ones(1, 2))
    assert step.end() is None
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", device.touch, raising=False)
    assert StepMeter()._device_memory() is None
    assert recorders() == []
    trial = TrialLog(None, 0)
    trial.pass_begins(torch.ones(()), 1)
    assert trial._losses == []
    assert device.touched == []


def test_a_capture_waits_for_a_call_that_has_begun() -> None:
    own, order = CaptureGate(), []
    graph = Graph()

    def begin() -> None:
        own.begin(graph)
        order.append("capture")

    with own.kept_open() as is_open:
        assert is_open
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join(0.05)
        order.append("call")
    thread.join()
    assert order == ["call", "capture"]
    with own.kept_open() as is_open:
        assert not is_open


def test_a_graph_that_nobody_holds_is_not_captured_any_more() -> None:
    own, graph = CaptureGate(), Graph()
    own.begin(graph)
    assert own.is_capturing
    del graph
    gc.collect()
    assert not own.is_capturing


class GatedCUDAGraph:
    """As torch.cuda.CUDAGraph; a second capture fails to begin."""

    captured = False

    def capture_begin(self) -> None:
        if self.captured:
            raise RuntimeError("captured before")
        self.captured = True

    def capture_end(self) -> None:
        """The recording is complete."""

    def replay(self) -> None:
        """Nothing of it is seen by Python's hooks."""


def make_graphed_callables(model: Any, given: Any) -> Any:
    """As torch does it: passes that warm up, then two captures."""
    weights = tuple(model.parameters())
    for _ in range(3):
        torch.autograd.grad(model(given).sum(), weights)
    forward, backward = GatedCUDAGraph(), GatedCUDAGraph()
    forward.capture_begin()
    loss = model(given).sum()
    forward.capture_end()
    backward.capture_begin()
    torch.autograd.grad(loss, weights)
    backward.capture_end()
    return model


@pytest.fixture
def gated_graphs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = ModuleType("torch.cuda.graphs")
    made = SimpleNamespace(module=module, graph=type("CUDAGraph", (GatedCUDAGraph,), {}))
    module.CUDAGraph, module.graph = made.graph, None  # type: ignore[attr-defined]
    module.make_graphed_callables = make_graphed_callables  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", module)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed_callables)
    return made


def steps_under_gate(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("rank-*/steps.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_capture_that_fails_to_begin_is_none(
    gated_graphs: SimpleNamespace, tmp_path: Path
) -> None:
    with watch(tmp_path / "run", step_on="auto", wait=100):
        graph = gated_graphs.graph()
        graph.capture_begin()
        assert gate.is_capturing
        graph.capture_end()
        assert not gate.is_capturing
        with pytest.raises(RuntimeError, match="captured before"):
            graph.capture_begin()
        assert not gate.is_capturing
    assert torch.cuda.make_graphed_callables is make_graphed_callables


def test_what_make_graphed_callables_runs_is_no_step(
    gated_graphs: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.measure.session.session.any_optimizer_created", lambda: exists)
    forget_problems()
    exists = False
    model, given = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with watch(tmp_path / "run", step_on="auto", wait=100) as run:
        torch.cuda.make_graphed_callables(model, given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exists = True
        for _ in range(5):
            model(given).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = steps_under_gate(run.folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["backward_ns"] and row["optimizer_ns"] for row in rows)
