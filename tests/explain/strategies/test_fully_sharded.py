"""Gathers and scatters by block, prefetch, and the bytes a parameter."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from stepscope.explain.memory.model import bytes_per_parameter
from stepscope.records.strategies import FullySharded, RankFullySharded

from ..build import AUTOGRAD, Events, note
from ..conftest import Read
from .found import US, comm, compute, join, strategies_of


def gather(name: str, start: float, end: float, *, at: float, elements: int = 4000) -> Events:
    out = note(f"FSDP::all_gather ({name})", start=at - 2, dur=5)
    around = ("c10d::_allgather_base_",)
    return out + comm(
        "_allgather_base", start, end, launched_at=at, around=around, elements=elements
    )


def used(name: str, at: float) -> Events:
    return note(f"FSDP::all_gather_copy_out ({name})", start=at, dur=1)


def scatter(name: str, start: float, end: float, *, at: float) -> Events:
    out = note(f"FSDP::post_backward_reduce ({name})", start=at - 3, dur=7, thread=AUTOGRAD)
    around = ("c10d::_reduce_scatter_base_",)
    return out + comm(
        "_reduce_scatter_base", start, end, launched_at=at, thread=AUTOGRAD, around=around
    )


def two_blocks() -> list[Events]:
    """Block b's gather runs 110 to 140 behind a's compute (100 to 200); c's waits for its end."""
    return [
        gather("a", 50, 100, at=0),
        used("a", 10),
        compute(100, 200, launched_at=20),
        gather("b", 110, 140, at=30),
        used("b", 40),
        compute(200, 300, launched_at=50),
        gather("c", 310, 330, at=60),
        used("c", 70),
        compute(330, 400, launched_at=80),
        compute(400, 450, launched_at=90, backward=True),
        scatter("c", 450, 480, at=100),
    ]


def only(found: tuple[object, ...]) -> RankFullySharded:
    (each,) = found
    assert isinstance(each, RankFullySharded)
    return each


def test_blocks_with_their_time_and_what_is_exposed(read: Read) -> None:
    each = only(strategies_of(read(*two_blocks())))
    assert (each.flavour, each.stage) == ("FSDP2", 3)
    assert [(b.name, b.operation, b.phase) for b in each.blocks] == [
        ("a", "gather", "forward"),
        ("b", "gather", "forward"),
        ("c", "gather", "forward"),
        ("c", "scatter", "backward"),
    ]
    assert [b.time_ns for b in each.blocks] == [50 * US, 30 * US, 20 * US, 30 * US]
    assert [b.exposed_ns for b in each.blocks] == [50 * US, 0, 20 * US, 30 * US]
    assert [b.size_bytes for b in each.blocks] == [16000, 16000, 16000, 4000]


def test_a_gather_is_prefetched_when_it_begins_before_the_block_in_front_ends(read: Read) -> None:
    each = only(strategies_of(read(*two_blocks())))
    assert [b.prefetched for b in each.blocks] == [None, True, False, None]
    assert each.blocks[1].lead_ns == 90 * US  # from 110 until a's compute ends at 200
    assert each.blocks[2].lead_ns == -10 * US
    assert each.prefetched_share == 0.5


def test_hybrid_sharding_replicates_in_a_second_group(read: Read) -> None:
    reduce = note("FSDP::post_backward_reduce (c)", start=107, dur=9, thread=AUTOGRAD) + comm(
        "allreduce",
        480,
        500,
        launched_at=112,
        thread=AUTOGRAD,
        around=("c10d::allreduce_",),
        group="7",
        size=2,
        description="mesh_replicate",
    )
    each = only(strategies_of(read(*two_blocks(), reduce)))
    assert [group.name for group in each.groups] == ["0"]
    assert [group.description for group in each.replicate_groups] == ["mesh_replicate"]
    (joined,) = join([(each,)])
    assert isinstance(joined, FullySharded)
    assert (joined.size, joined.replicas) == (4, 2)


def test_the_first_fsdp_has_no_names_for_its_blocks(read: Read) -> None:
    events = []
    for place, at in enumerate((0, 40)):
        events.append(note("FullyShardedDataParallel._pre_forward", start=at - 3, dur=9))
        events.append(comm("_allgather_base", 10 + at, 20 + at, launched_at=at))
        events.append(compute(20 + at, 40 + at, launched_at=at + 20 + place))
    each = only(strategies_of(read(*events)))
    assert each.flavour == "FSDP1"
    assert [block.name for block in each.blocks] == ["#0", "#1"]


def test_gathers_after_the_scatters_are_zero_of_a_lower_stage(read: Read) -> None:
    each = only(
        strategies_of(
            read(
                compute(0, 100, launched_at=-10),
                comm("_reduce_scatter_base", 100, 110, launched_at=20),
                comm("_allgather_base", 110, 120, launched_at=40),
            )
        )
    )
    assert (each.flavour, each.stage) == ("ZeRO", 2)


@pytest.mark.parametrize(
    ("shards", "expected"),
    [(1, (16, 16, 16, 16)), (4, (16, 7, 5.5, 4)), (64, (16, 4.1875, 2.21875, 0.25))],
)
def test_bytes_a_parameter(shards: int, expected: tuple[float, ...]) -> None:
    per_stage = tuple(bytes_per_parameter(stage, shards) for stage in range(4))
    assert per_stage == pytest.approx(expected)


def test_memory_is_the_formula_beside_what_was_measured(read: Read) -> None:
    trace = read(*two_blocks())
    categories = {"parameters": 12000, "gradients": 12000, "optimizer": 24000, "other": None}
    phases = [
        {"phase": "forward", "categories": {}},
        {"phase": "optimizer", "categories": categories},
    ]
    memory = Path(trace.path).parent / "memory.json"
    memory.write_bytes(msgspec.json.encode({"schema": 1, "phases": phases}))
    each = only(strategies_of(trace))
    assert each.memory is not None
    assert (each.memory.parameters, each.memory.shards) == (12_000, 4)  # three blocks of 4000
    assert each.memory.formula_bytes == (192_000, 84_000, 66_000, 48_000)
    assert each.memory.measured_bytes == 48_000
    memory.write_text('{"phases": [')
    (each,) = strategies_of(trace)
    assert each.memory is not None
    assert each.memory.measured_bytes is None
