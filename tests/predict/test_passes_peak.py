"""The highest point of both passes: by hand, on small graphs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stepscope.predict.peak_memory.backward_graph import MemoryChange, hold
from stepscope.predict.peak_memory.passes import GraphLevels, replay_forward
from stepscope.predict.peak_memory.peak import find_peak_node, passes_then
from stepscope.records.memory import CapturedBackward, CapturedMemory, CapturedPeak, CapturedPhase

FLOAT = "float32"
MODULES = [
    *(["", "Net", 3, False], ["blocks", "ModuleList", 3, False]),
    *([f"blocks.{number}", "Block", 1, False] for number in range(3)),
    *([f"blocks.{number}.act", "ReLU", 0, False] for number in range(3)),
    ["head", "Head", 0, False],
]


def graph_of(nodes: list[Any], storages: int, size: int = 40) -> CapturedBackward:
    kept = [[size, "activation"]] * storages
    return msgspec.convert({"modules": MODULES, "storages": kept, "nodes": nodes}, CapturedBackward)


def relu(module: str, before: int, storage: int) -> list[Any]:
    """A result of ten elements, which it keeps."""
    place = [path for path, *_ in MODULES].index(module)
    saved = [["result", storage, 10, FLOAT]]
    return ["ReluBackward0", place, [[10, FLOAT]], [[before, 0]], saved]


# Three blocks of two activations each, then two of the head.
CHAIN = graph_of(
    [
        *(relu(f"blocks.{place // 2}.act", place - 1, place) for place in range(6)),
        *(relu("head", place - 1, place) for place in (6, 7)),
    ],
    storages=8,
)


def captured(graph: CapturedBackward, phase: str, activations: int, peak: int) -> CapturedMemory:
    categories = {"parameters": 0, "gradients": 0, "activations": activations}
    return CapturedMemory(
        device="cuda",
        categories=categories,
        phases=(
            CapturedPhase(
                phase="forward", categories={"activations": 320}, allocated_bytes=320 + 1_000
            ),
        ),
        peak=CapturedPeak(categories=categories, phase=phase, allocated_bytes=peak),
        graph=graph,
    )


def levels_of(activations: int, peak: int = 1_500, phase: str = "backward") -> GraphLevels:
    return GraphLevels(captured(CHAIN, phase, activations, peak))


def test_what_was_kept_at_the_peak_names_the_node_that_ran() -> None:
    # Each node lets go of 40 bytes: with 240 of 320 left, two of eight have run.
    node = find_peak_node(levels_of(240), "backward")
    assert node is not None
    assert node.place == 5
    assert find_peak_node(levels_of(240), "forward") is None
    assert find_peak_node(levels_of(200 + 20), "backward") is None  # no moment of this graph


def test_of_an_activation_and_the_convolution_after_it_the_convolution_needs_the_workspace() -> (
    None
):
    """The activation runs beside the result it was given, the convolution beside its own."""

    def convolution(before: int) -> list[Any]:
        saved = [["input", 0, 10, FLOAT]] if before >= 0 else []
        return ["ConvolutionBackward0", 0, [[10, FLOAT]], [[before, 0]], saved]

    nodes = [convolution(-1), relu("head", 0, 0), convolution(1), relu("head", 2, 1)]
    graph = graph_of(nodes, storages=2)
    levels = GraphLevels(captured(graph, "forward", 40, 1_500))
    node = find_peak_node(levels, "forward")
    assert node is not None
    assert node.place == 2


def test_a_workspace_outside_of_the_blocks_is_only_there() -> None:
    """The peak, 500 bytes beside the 1,000 of every step, was in the head."""
    levels = levels_of(320)
    head = levels.backward(MemoryChange()).at(7)
    again = levels.backward(MemoryChange(recompute=True))
    peak, doubt = passes_then(levels, 1_500, MemoryChange(recompute=True))
    assert peak == 1_000 + max(again.peak_bytes, again.at(7) + (500 - head))
    assert doubt > 0


def test_blocks_are_alike_so_each_may_need_the_workspace_of_one() -> None:
    levels = levels_of(240)
    now, again = (levels.backward(MemoryChange(recompute=on)) for on in (False, True))
    peak, _ = passes_then(levels, 1_500, MemoryChange(recompute=True))
    assert peak == 1_000 + max(
        again.peak_bytes + 500 - now.peak_bytes, again.at(5) + 500 - now.at(5)
    )


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("activations", [320, 240, 100])  # no moment has 100
def test_without_a_change_the_peak_is_what_was_measured(phase: str, activations: int) -> None:
    levels = levels_of(activations, phase=phase)
    assert passes_then(levels, 1_500, MemoryChange())[0] == 1_500


# Two products [10] that nobody keeps, joined; a convolution keeps what was joined and is followed
# by another operator of the same module, then by one outside.
JOINED = msgspec.convert(
    {
        "modules": [["", "Net", 1, False], ["head", "Head", 1, False], ["act", "ReLU", 0, False]],
        "storages": [[80, "activation"]],
        "nodes": [
            ["AddBackward0", 1, [[10, FLOAT]], [[-1, 0]], []],
            ["AddBackward0", 1, [[10, FLOAT]], [[-1, 0]], []],
            ["CatBackward0", 1, [[20, FLOAT]], [[0, 0], [1, 0]], []],
            ["ConvolutionBackward0", 1, [[10, FLOAT]], [[2, 0]], [["input", 0, 20, FLOAT]]],
            ["NegBackward0", 1, [[10, FLOAT]], [[3, 0]], []],
            ["NegBackward0", 2, [[10, FLOAT]], [[4, 0]], []],
        ],
    },
    CapturedBackward,
)


def forward(**change: Any) -> list[float]:
    held = hold(JOINED, "cuda", MemoryChange(**change))
    return [node.peak_bytes for node in replay_forward(held)]


def test_tensors_that_are_joined_stay_in_a_list_until_their_module_returns() -> None:
    # 40 each, then 80 for the joined ones, then 40 for each result; the last operator is outside.
    assert forward() == [40, 80, 80 + 80, 160 + 40, 160 + 40 + 40, 80 + 40 + 40]


def test_a_cast_copy_is_made_beside_the_value_that_it_copies() -> None:
    # The convolution keeps a narrow copy of 40 beside the 80 that were joined, which then go; its
    # result and what follows is narrow.
    assert forward(autocast=True) == [40, 80, 160, 160 + 40 + 20, 80 + 40 + 40, 40 + 40]


def test_the_allocator_agrees_about_forward() -> None:
    """Maps of one module in a list, joined and projected to few features: what backward keeps is
    half of what forward holds."""
    torch = pytest.importorskip("torch")
    from stepscope.fix.memory_meters import meter_on_host
    from stepscope.measure.memory.memory_step import MemoryStep

    class Head(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.maps = torch.nn.ModuleList(torch.nn.Linear(8, 64) for _ in range(4))
            self.fuse = torch.nn.Linear(4 * 64, 16)

        def forward(self, given: Any) -> Any:
            maps = [each(given) for each in self.maps]
            return torch.tanh(self.fuse(torch.cat(maps, -1)))

    model, given = Head(), torch.randn(512, 8)

    def step() -> None:
        model(given).sum().backward()

    step()
    model.zero_grad()
    watch = MemoryStep([torch.optim.SGD(model.parameters(), lr=0.0)])
    watch.begin()
    watch.phase("backward", entering=True)
    step()
    watch.phase("backward", entering=False)
    graph = msgspec.convert(watch.end()["graph"], CapturedBackward)
    model.zero_grad()
    truth = int(meter_on_host(lambda: model(given).sum())[1])
    promised = max(node.peak_bytes for node in replay_forward(hold(graph, "cpu", MemoryChange())))
    assert promised == pytest.approx(truth, rel=0.05)
