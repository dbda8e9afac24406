"""Collectives inside forward and backward, and by module where modules were recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stepscope.records.strategies import RankTensorParallel, TensorParallel

from ..build import AUTOGRAD, Events, frame, op
from .found import ENGINE, US, comm, compute, join, strategies_of

if TYPE_CHECKING:
    from ..conftest import Read

FUNCTIONAL = ("_c10d_functional::all_reduce", "c10d::allreduce_")


def split_layers(around: tuple[str, ...] = FUNCTIONAL, description: str = "") -> list[Events]:
    """Two layers forward, one backward: each computes 100 and then meets for 20."""
    kwargs = {"around": around, "group": "3", "description": description}
    behind = {**kwargs, "around": (ENGINE, *around)}
    return [
        compute(0, 100, launched_at=-90),
        comm("allreduce", 100, 120, launched_at=-80, **kwargs),
        compute(120, 220, launched_at=-60),
        comm("allreduce", 220, 240, launched_at=-50, **kwargs),
        compute(240, 340, launched_at=-30, backward=True),
        comm("allreduce", 340, 360, launched_at=-20, thread=AUTOGRAD, **behind),
        compute(360, 400, launched_at=-10, backward=True),
    ]


def only(found: tuple[object, ...]) -> RankTensorParallel:
    (each,) = found
    assert isinstance(each, RankTensorParallel)
    return each


def test_functional_collectives_are_counted_by_phase(read: Read) -> None:
    each = only(strategies_of(read(*split_layers())))
    assert (each.forward_count, each.backward_count) == (2, 1)
    assert each.comm_ns == each.exposed_ns == 60 * US
    assert each.size_bytes == 12_000
    (joined,) = join([(each,), (each,)])
    assert isinstance(joined, TensorParallel)
    assert joined.comm_share == pytest.approx(60 / 400)


def test_a_group_named_tp_needs_no_functional_collectives(read: Read) -> None:
    each = only(strategies_of(read(*split_layers(("c10d::allreduce_",), "mesh_tp"))))
    assert each.evidence == ("the group's name says so",)


def test_the_same_sizes_forward_and_backward_are_tensor_parallel_too(read: Read) -> None:
    each = only(strategies_of(read(*split_layers(("c10d::allreduce_",)))))
    assert each.evidence == ("all-reduces of the same sizes in forward and in backward",)


@pytest.mark.parametrize("name", ["mesh_output", "stepper", "http", "mesh_dp"])
def test_names_that_only_contain_the_letters_say_nothing(read: Read, name: str) -> None:
    events = split_layers(("c10d::allreduce_",), name)
    del events[3]  # once forward, once backward is not alike enough
    assert not any(isinstance(each, RankTensorParallel) for each in strategies_of(read(*events)))


def test_layers_where_modules_were_recorded(read: Read) -> None:
    """Backward belongs to the module whose forward operator it undoes."""
    events = split_layers()
    events += [
        frame("nn.Module: Block_0", start=-95, dur=20),
        frame("nn.Module: Block_1", start=-65, dur=20),
        op("aten::down", start=-49, dur=2, sequence=5),
        op("DownBackward0", start=-22.5, dur=5.5, thread=AUTOGRAD, sequence=5, forward_thread=1),
    ]
    each = only(strategies_of(read(*events)))
    assert [(la.name, la.forward_count, la.backward_count) for la in each.layers] == [
        ("Block_0", 1, 0),
        ("Block_1", 1, 1),
    ]
    assert [layer.exposed_ns for layer in each.layers] == [20 * US, 40 * US]


def test_split_parameters_are_those_of_the_tp_dimension(read: Read) -> None:
    placements = [
        {"mesh": ["dp", "tp"], "placements": ["S(0)", "S(1)"], "count": 3},
        {"mesh": ["dp", "tp"], "placements": ["S(0)", "R"], "count": 5},
    ]
    each = only(strategies_of(read(*split_layers()), {"placements": placements}))
    assert each.split_parameters == 3
