"""Collectives inside forward and backward, and by module where modules were recorded."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.records.strategies import (
    RankFullySharded,
    RankOtherCommunication,
    RankTensorParallel,
    TensorParallel,
)

from ..build import AUTOGRAD, Events, frame, op
from ..conftest import Read
from .found import ENGINE, US, comm, compute, join, strategies_of

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


def test_the_parameters_groups_tell_where_no_mesh_has_names(read: Read) -> None:
    placements = [{"mesh": [], "groups": ["3"], "placements": ["S(0)"], "count": 4}]
    each = only(strategies_of(read(*split_layers()), {"placements": placements}))
    assert each.split_parameters == 4


def test_functional_collectives_of_a_model_that_nothing_splits_are_not_tensor_parallel(
    read: Read,
) -> None:
    events = split_layers()
    del events[3]  # once forward, once backward is not alike enough
    found = strategies_of(read(*events), {"placements": []})
    assert not any(isinstance(each, RankTensorParallel) for each in found)


def test_a_loss_that_is_summed_in_a_bare_trace_is_not_tensor_parallel(read: Read) -> None:
    loss = comm("allreduce", 100, 120, launched_at=-80, around=FUNCTIONAL, elements=1)
    found = strategies_of(read(compute(0, 100, launched_at=-90), loss))
    assert [type(each) for each in found] == [RankOtherCommunication]


def gather_and_clip() -> list[Events]:
    """FSDP2 gathers in group 0, and gradient clipping sums norms there by a functional call."""
    around = ("FSDP::all_gather (a)", "c10d::_allgather_base_")
    return [
        comm("_allgather_base", 50, 100, launched_at=0, around=around, elements=4000),
        compute(100, 200, launched_at=20),
        comm("allreduce", 210, 230, launched_at=40, around=FUNCTIONAL, elements=125),
    ]


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"placements": [{"mesh": [], "groups": ["0"], "placements": ["S(0)"], "count": 125}]},
    ],
    ids=["bare trace", "captured"],
)
def test_gradient_clipping_over_the_shards_is_not_tensor_parallel(
    read: Read, layout: dict[str, Any]
) -> None:
    found = strategies_of(read(*gather_and_clip()), layout)
    assert [type(each) for each in found] == [RankFullySharded, RankOtherCommunication]


def test_a_mesh_of_shards_and_split_layers_has_both(read: Read) -> None:
    placements = [
        {"mesh": ["a", "b"], "groups": ["0", "3"], "placements": ["S(0)", "S(1)"], "count": 6}
    ]
    layer = comm("allreduce", 240, 260, launched_at=50, around=FUNCTIONAL, group="3")
    found = strategies_of(read(*gather_and_clip(), layer), {"placements": placements})
    sharded, split, rest = found
    assert isinstance(sharded, RankFullySharded)
    assert isinstance(split, RankTensorParallel)
    assert ([group.name for group in split.groups], split.split_parameters) == (["3"], 6)
    assert isinstance(rest, RankOtherCommunication)
