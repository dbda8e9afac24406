"""While a CUDA graph is captured, nothing of ours touches the device, in any thread."""

from __future__ import annotations

import gc
import json
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stepscope.measure.cluster.flight_recorder import recorders
from stepscope.measure.cuda_graphs import CaptureGate, gate
from stepscope.measure.never_raise import forget_problems
from stepscope.measure.session import special_steps
from stepscope.measure.session.special_steps import HostStep
from stepscope.measure.session.trial import TrialLog
from stepscope.measure.steps.phases import ENDED
from stepscope.measure.steps.step_times import DeviceClock, StepLines, StepMeter
from stepscope.measure.watch import watch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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

    def Event(self, **_: Any) -> Event:  # noqa: N802
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        device.alive += 1

    def __del__(self) -> None:
        self._device.alive -= 1

    def record(self) -> None:
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


class FakeCUDAGraph:
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
    forward, backward = FakeCUDAGraph(), FakeCUDAGraph()
    forward.capture_begin()
    loss = model(given).sum()
    forward.capture_end()
    backward.capture_begin()
    torch.autograd.grad(loss, weights)
    backward.capture_end()
    return model


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = ModuleType("torch.cuda.graphs")
    made = SimpleNamespace(module=module, graph=type("CUDAGraph", (FakeCUDAGraph,), {}))
    module.CUDAGraph, module.graph = made.graph, None  # type: ignore[attr-defined]
    module.make_graphed_callables = make_graphed_callables  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", module)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed_callables)
    return made


def steps_of(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("rank-*/steps.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_capture_that_fails_to_begin_is_none(graphs: SimpleNamespace, tmp_path: Path) -> None:
    with watch(tmp_path / "run", step_on="auto", wait=100):
        graph = graphs.graph()
        graph.capture_begin()
        assert gate.is_capturing
        graph.capture_end()
        assert not gate.is_capturing
        with pytest.raises(RuntimeError, match="captured before"):
            graph.capture_begin()
        assert not gate.is_capturing
    assert torch.cuda.make_graphed_callables is make_graphed_callables


def test_what_make_graphed_callables_runs_is_no_step(
    graphs: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    rows = steps_of(run.folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["backward_ns"] and row["optimizer_ns"] for row in rows)
