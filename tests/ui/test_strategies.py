"""A heading and a table for each strategy, in words a person reads."""

from __future__ import annotations

import io

from rich.console import Console, Group

from stepscope.records.job import Group as ProcessGroup
from stepscope.records.strategies import (
    Bucket,
    DataParallel,
    FullySharded,
    OtherCommunication,
    Pipeline,
    ShardedBlock,
    ShardMemory,
    Stage,
    Strategy,
    TensorParallel,
    Use,
)
from stepscope.ui.terminal.distributed import strategy_sections

MS = 1_000_000
GROUP = ProcessGroup(name="1", description="mesh_dp", size=4, ranks=(0, 1, 2, 3))
COSTS = {
    "ranks": (0, 1, 2, 3),
    "step_ns": 100 * MS,
    "comm_ns": 20 * MS,
    "exposed_ns": 10 * MS,
    "exposed_share": 0.1,
}
SPREAD = {**COSTS, "size": 4, "groups": (GROUP,), "evidence": ()}


def shown(*strategies: Strategy, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(Group(*strategy_sections(strategies, width=width)))
    return out.getvalue()


def test_buckets_say_why_they_are_exposed() -> None:
    common = {"size_bytes": 4_000_000, "ready_ns": 1 * MS, "start_ns": 2 * MS, "end_ns": 9 * MS}
    times = {"time_ns": 7 * MS, "exposed_ns": 5 * MS}
    text = shown(
        DataParallel(
            **SPREAD,
            backward_ns=60 * MS,
            buckets=(
                Bucket(index=0, why="last", **common, **times),
                Bucket(index=1, why="late rank", late_rank=3, **common, **times),
            ),
        )
    )
    assert "4 replicas · 2 buckets · 10.0 ms of 20.0 ms exposed (10% of the step)" in text
    assert "no compute left to overlap with" in text
    assert "waits for rank 3" in text


def test_blocks_and_the_memory_formula() -> None:
    memory = ShardMemory(
        parameters=1_000_000,
        shards=4,
        bytes_per_parameter=(16, 7, 5.5, 4),
        formula_bytes=(16_000_000, 7_000_000, 5_500_000, 4_000_000),
        measured_parameter_bytes=1_000_000,
        measured_gradient_bytes=1_000_000,
        measured_optimizer_bytes=2_100_000,
    )
    block = ShardedBlock(
        name="layers.3",
        operation="gather",
        phase="forward",
        count=1,
        size_bytes=40_000,
        time_ns=3 * MS,
        exposed_ns=2 * MS,
        lead_ns=-5,
        prefetched=False,
    )
    text = shown(
        FullySharded(
            **SPREAD,
            flavour="FSDP2",
            stage=3,
            replicas=2,
            replicate_groups=(),
            blocks=(block,),
            prefetched_share=0.0,
            memory=memory,
        )
    )
    assert "FSDP2 · 4 shards · x 2 replicas" in text
    assert "layers.3" in text
    assert "not prefetched" in text
    assert "1.00 M parameters: formula 4.00 MB at stage 3, measured 4.10 MB a rank" in text


def test_stages_and_the_one_that_decides() -> None:
    stages = tuple(
        Stage(
            stage_indices=(i,),
            ranks=(i,),
            step_ns=100 * MS,
            compute_ns=60 * MS,
            other_comm_ns=0,
            bubble_ns=40 * MS,
            bubble_share=0.4,
            receive_wait_ns=30 * MS,
        )
        for i in range(2)
    )
    text = shown(
        Pipeline(
            ranks=(0, 1),
            size=2,
            replicas=1,
            groups=(),
            evidence=(),
            schedule="fill and drain",
            microbatches=4,
            stages=stages,
            bubble_share=0.4,
            bound_share=0.2,
            imbalance=1.2,
            deciding_stage=1,
        )
    )
    assert "2 stages · 4 micro-batches · fill and drain · bubble 40% (at least 20%)" in text
    assert [line.split()[0] for line in text.splitlines() if "slowest" in line] == ["1"]


def test_split_layers_and_the_rest() -> None:
    tensor = TensorParallel(
        **SPREAD,
        forward_count=3,
        backward_count=2.5,
        size_bytes=1,
        comm_share=0.2,
        split_parameters=None,
        layers=(),
    )
    use = Use(
        operation="all_gather",
        group=GROUP,
        caller="Optimizer.step#Shampoo.step",
        count=1,
        time_ns=3 * MS,
        exposed_ns=MS,
    )
    text = shown(tensor, OtherCommunication(**COSTS, uses=(use,)), width=140)
    assert "3 forward + 2.5 backward" in text
    assert "all_gather" in text
    assert "mesh_dp" in text
    assert "Shampoo" in text


def test_one_rank_shows_nothing() -> None:
    assert shown().strip() == ""
