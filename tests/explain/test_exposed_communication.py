"""What is offered against exposed communication follows the strategy and the sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stepscope.explain.rank import explain_rank

from .build import AUTOGRAD, Events
from .strategies.found import ENGINE, comm, compute

if TYPE_CHECKING:
    from .conftest import Read

FUNCTIONAL = ("_c10d_functional::all_reduce", "c10d::allreduce_")
LARGE, SMALL = 1_000_000, 21  # elements of 4 bytes


def replicas(elements: int) -> list[Events]:
    """DDP: one all-reduce that backward calls and nothing hides."""
    around = (ENGINE, "c10d::allreduce_")
    return [
        compute(0, 100, launched_at=-90),
        compute(100, 200, launched_at=-60, backward=True),
        comm("allreduce", 200, 300, launched_at=-50, thread=AUTOGRAD, around=around,
             elements=elements),
    ]  # fmt: skip


def shards(elements: int) -> list[Events]:
    around = ("FSDP::all_gather (a)", "c10d::_allgather_base_")
    return [
        comm("_allgather_base", 0, 100, launched_at=-50, around=around, elements=elements),
        compute(100, 200, launched_at=-40),
    ]


def split(elements: int) -> list[Events]:
    return [
        compute(0, 100, launched_at=-90),
        comm("allreduce", 100, 200, launched_at=-50, around=FUNCTIONAL, elements=elements,
             description="mesh_tp"),
    ]  # fmt: skip


def loss() -> list[Events]:
    return [
        compute(0, 100, launched_at=-90),
        comm("allreduce", 100, 200, launched_at=-50, around=("c10d::allreduce_",), elements=1),
    ]


def offered(read: Read, events: list[Events]) -> list[str]:
    rank = explain_rank(read(*events))
    (found,) = (each for each in rank.findings if each.id == "exposed-communication")
    return [remedy.id for remedy in found.remedies]


@pytest.mark.parametrize(
    ("events", "remedies"),
    [
        (replicas(LARGE), ["bucket-mb", "accumulate", "bandwidth"]),
        (replicas(SMALL), ["accumulate", "batch"]),
        (shards(LARGE), ["fsdp-prefetch", "keep-gathered", "reduce-dtype"]),
        (shards(SMALL), ["fsdp-prefetch", "larger-blocks", "batch"]),
        (split(LARGE), ["fewer-splits", "sequence-parallel"]),
        (split(SMALL), ["fewer-splits", "batch"]),
        (loss(), ["less-often"]),
    ],
    ids=["DDP", "84 bytes", "FSDP", "small shards", "split layers", "small layers", "a loss"],
)
def test_remedies_follow_the_strategy_and_the_sizes(
    read: Read, events: list[Events], remedies: list[str]
) -> None:
    assert offered(read, events) == remedies
