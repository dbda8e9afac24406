"""Which kept values could be made again: on made-up graphs, and on a real one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from stepscope.measure.memory.autograd_graph import OperatorNode, sum_by_producer
from stepscope.measure.memory.memory_step import MemoryStep


@dataclass
class Kept:
    size_bytes: int
    made: int | None
    tensors: int = 1


def free_bytes(nodes: dict[int, OperatorNode], *kept: Kept) -> dict[str, int]:
    return {row["producer"]: row["free_bytes"] for row in sum_by_producer(nodes, kept)}


def test_an_activation_is_free_where_its_input_is_kept() -> None:
    nodes = {1: OperatorNode("Addmm", ()), 2: OperatorNode("Gelu", (1,))}
    assert free_bytes(nodes, Kept(10, 1), Kept(20, 2)) == {"Gelu": 20, "Addmm": 0}
    assert free_bytes(nodes, Kept(20, 2)) == {"Gelu": 0}  # the product would have to be kept


def test_cheap_operators_in_between_are_made_again_on_the_way() -> None:
    nodes = {
        1: OperatorNode("Convolution", ()),
        2: OperatorNode("NativeBatchNorm", (1,)),
        3: OperatorNode("Relu", (2,)),
    }
    assert free_bytes(nodes, Kept(8, 1), Kept(8, 3)) == {"Convolution": 0, "Relu": 8}


def test_a_sum_is_not_free_where_one_addend_is_gone() -> None:
    nodes = {
        1: OperatorNode("Addmm", ()),
        2: OperatorNode("Addmm", ()),
        3: OperatorNode("Add", (1, 2)),
    }
    assert free_bytes(nodes, Kept(8, 1), Kept(8, 3))["Add"] == 0
    assert free_bytes(nodes, Kept(8, 1), Kept(8, 2), Kept(8, 3))["Add"] == 8


def test_a_view_stands_for_what_it_shows() -> None:
    nodes = {
        1: OperatorNode("Addmm", ()),
        2: OperatorNode("Tanh", (1,)),
        3: OperatorNode("View", (2,)),
    }
    assert free_bytes(nodes, Kept(4, 1), Kept(4, 3)) == {"Addmm": 0, "Tanh": 4}


def test_a_value_of_an_unknown_node_is_kept() -> None:
    assert free_bytes({}, Kept(4, None), Kept(4, 9)) == {"": 0}


def test_a_real_step_says_what_gelu_made() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = MemoryStep([optimizer])
    step.begin()
    loss = model(torch.randn(16, 8)).square().mean()
    step.phase("backward", entering=True)
    loss.backward()
    step.phase("backward", entering=False)
    optimizer.step()
    content = step.end()
    rows = {row["producer"]: row for row in content["activations_by_producer"]}
    assert rows["Gelu"]["bytes"] == rows["Gelu"]["free_bytes"] == 16 * 32 * 4
    assert rows["Addmm"]["free_bytes"] == 0
    total = sum(row["bytes"] for row in rows.values())
    assert total == content["categories"]["activations"]
