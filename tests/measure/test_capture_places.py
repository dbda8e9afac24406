"""The source lines of what a CUDA graph records, with a graph that only pretends to be one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stepscope.measure.cuda_graphs import GraphCaptures
from stepscope.measure.patches import attaching, detach
from stepscope.trace.run_folder.compiler_record import read_captures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.records.compiled import CapturedGraph

HERE = Path(__file__)


class PretendedGraph:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GraphCaptures, Any]]:
    graph = type("graph", (PretendedGraph,), {})
    module = ModuleType("torch.cuda.graphs")
    module.graph = graph  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", module)
    captures = GraphCaptures()
    with attaching() as layer:
        captures.attach()
    yield captures, graph
    detach(layer)


def read(captures: GraphCaptures, folder: Path) -> tuple[CapturedGraph, ...]:
    captures.write(folder)
    graphs, notes = read_captures(folder)
    assert not notes
    return graphs


def line_of(text: str) -> int:
    lines = HERE.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(text))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)

    def forward(self, given: Any) -> Any:
        hidden = self.inner(given)  # the product
        return torch.relu(hidden)  # the activation


def test_both_passes_have_the_forward_line_and_the_optimizer_is_marked(
    capturing: tuple[GraphCaptures, Any], tmp_path: Path
) -> None:
    captures, graph = capturing
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with graph():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    (capture,) = read(captures, tmp_path)
    by_name = {(one.name, one.backward): one for one in capture.operators}
    product, activation = line_of("# the product"), line_of("# the activation")
    for name, backward, line in (
        ("aten::addmm", False, product),
        ("aten::relu", False, activation),
        ("aten::mm", True, product),
        ("aten::threshold_backward", True, activation),
    ):
        place = by_name[name, backward].place
        assert place is not None
        assert (Path(place.file), place.line, place.function) == (HERE, line, "forward")
    stepping = {one.name for one in capture.operators if one.optimizer}
    assert stepping
    assert not stepping & {"aten::addmm", "aten::mm", "aten::relu"}


def test_a_backward_pass_captured_by_itself_has_the_lines_of_its_forward(
    capturing: tuple[GraphCaptures, Any], tmp_path: Path
) -> None:
    """As make_graphed_callables captures them."""
    captures, graph = capturing
    model = Model()
    with graph():
        loss = model(torch.ones(2, 4)).sum()
    with graph():
        loss.backward()
    _, backward = read(captures, tmp_path)
    product = next(one for one in backward.operators if one.name == "aten::mm")
    assert product.place is not None
    assert product.place.line == line_of("# the product")
