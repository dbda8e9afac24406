"""Joins the strategies of all ranks: means over ranks, late ranks, stages in order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from msgspec.structs import replace

from stepscope.explain.strategies.evidence import mean
from stepscope.records.job import Clock
from stepscope.records.strategies import (
    Bucket,
    DataParallel,
    FullySharded,
    Layer,
    OtherCommunication,
    Pipeline,
    RankDataParallel,
    RankFullySharded,
    RankOtherCommunication,
    RankPipeline,
    RankTensorParallel,
    ShardedBlock,
    Stage,
    TensorParallel,
    Use,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.records.job import Group
    from stepscope.records.strategies import RankStrategy, Schedule, Strategy, Why

    Parts = Sequence[tuple[int, tuple[RankStrategy, ...]]]

_T = TypeVar("_T")
_ALIKE = 1.05  # stages whose compute differs less are balanced
_NO_CLOCK = Clock(aligned=False)
_LATE = 0.1  # share of forward's compute from which forwards and backwards alternate


def join_strategies(parts: Parts, clock: Clock = _NO_CLOCK) -> tuple[Strategy, ...]:
    """One record per strategy (data parallelism: one per layout of buckets), in a fixed order. One
    rank alone needs no clock."""
    joined: list[Strategy] = [*_pipelines(_select(parts, RankPipeline))]
    if sharded := _select(parts, RankFullySharded):
        joined.append(_fully_sharded(sharded))
    if tensor := _select(parts, RankTensorParallel):
        joined.append(_tensor_parallel(tensor))
    joined += _data_parallel(_select(parts, RankDataParallel), clock)
    if others := _select(parts, RankOtherCommunication):
        joined.append(_other(others))
    return tuple(joined)


def _select(parts: Parts, kind: type[_T]) -> list[tuple[int, _T]]:
    return [
        (rank, strategy) for rank, own in parts for strategy in own if isinstance(strategy, kind)
    ]


def _ranks(parts: Sequence[tuple[int, object]]) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, _ in parts))


def _distinct(items: Iterable[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(items))


def _groups(of: Iterable[tuple[Group, ...]]) -> tuple[Group, ...]:
    return _distinct(group for groups in of for group in groups)


def _size(groups: Sequence[Group]) -> int | None:
    sizes = {group.size for group in groups if group.size}
    return sizes.pop() if len(sizes) == 1 else None


def _known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _share(part_ns: int, step_ns: int) -> float:
    return part_ns / step_ns if step_ns else 0.0


# Data parallelism


def _data_parallel(parts: list[tuple[int, RankDataParallel]], clock: Clock) -> list[DataParallel]:
    """Ranks of one group wait for each other; groups with the same buckets share a record."""
    cohorts: dict[tuple[object, ...], list[tuple[int, RankDataParallel]]] = {}
    for rank, part in parts:
        first = part.groups[0] if part.groups else None
        key = (first.ranks or first.name) if first else ""
        cohorts.setdefault((key,), []).append((rank, part))
    waited = [pair for cohort in cohorts.values() for pair in _with_waits(cohort, clock)]
    layouts: dict[tuple[object, ...], list[tuple[int, RankDataParallel]]] = {}
    for rank, part in waited:
        layout = tuple((bucket.size_bytes, bucket.parameters) for bucket in part.buckets)
        layouts.setdefault(layout, []).append((rank, part))
    return [_replicas(same) for same in layouts.values()]


def _with_waits(
    cohort: list[tuple[int, RankDataParallel]], clock: Clock
) -> list[tuple[int, RankDataParallel]]:
    """Add how long each bucket of each rank waited for the last rank, if clocks are aligned."""
    shapes = {(part.steps, len(part.buckets)) for _, part in cohort}
    size = cohort[0][1].groups[0].size if cohort[0][1].groups else None
    if not clock.aligned or len(cohort) < 2 or len(cohort) != size or len(shapes) != 1:
        return cohort
    came = np.stack(
        [clock.shift_ns(rank, np.array(part.arrivals_ns, np.int64)) for rank, part in cohort]
    )
    last = came.max(axis=0)
    late = came.argmax(axis=0)
    error = max(clock.error_ns.get(rank, 0) for rank, _ in cohort)
    out = []
    for place, (rank, part) in enumerate(cohort):
        wait = (last - came[place]).mean(axis=0)
        buckets = tuple(
            _blame(bucket, round(float(wait[i])), cohort[_usual(late[:, i])][0], rank, error)
            for i, bucket in enumerate(part.buckets)
        )
        out.append((rank, replace(part, buckets=buckets)))
    return out


def _usual(values: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> int:
    return int(np.bincount(values).argmax())


def _blame(bucket: Bucket, wait_ns: int, late: int, rank: int, error_ns: int) -> Bucket:
    waited = wait_ns > error_ns and wait_ns >= bucket.exposed_ns / 2 and late != rank
    why: Why = "late rank" if waited and bucket.why != "hidden" else bucket.why
    return replace(bucket, wait_ns=wait_ns, late_rank=late, why=why)


def _replicas(parts: list[tuple[int, RankDataParallel]]) -> DataParallel:
    first = parts[0][1]
    own = [part for _, part in parts]
    step_ns = mean([part.step_ns for part in own])
    exposed = mean([part.exposed_ns for part in own])
    groups = _groups(part.groups for part in own)
    return DataParallel(
        ranks=_ranks(parts),
        size=_size(groups),
        groups=groups,
        evidence=_distinct(word for part in own for word in part.evidence),
        step_ns=step_ns,
        backward_ns=_known(part.backward_ns for part in own),
        comm_ns=mean([part.comm_ns for part in own]),
        exposed_ns=exposed,
        exposed_share=_share(exposed, step_ns),
        buckets=tuple(
            _bucket([part.buckets[i] for part in own]) for i in range(len(first.buckets))
        ),
    )


def _bucket(same: list[Bucket]) -> Bucket:
    """Means; the cause that costs most over all ranks."""
    cost: Counter[Why] = Counter()
    for bucket in same:
        cost[bucket.why] += bucket.exposed_ns
    exposed = mean([bucket.exposed_ns for bucket in same])
    time_ns = mean([bucket.time_ns for bucket in same])
    late = Counter(bucket.late_rank for bucket in same if bucket.late_rank is not None)
    return Bucket(
        index=same[0].index,
        size_bytes=same[0].size_bytes,
        parameters=same[0].parameters,
        ready_ns=_known(bucket.ready_ns for bucket in same),
        start_ns=_known(bucket.start_ns for bucket in same),
        end_ns=_known(bucket.end_ns for bucket in same),
        time_ns=time_ns,
        exposed_ns=exposed,
        why="hidden" if exposed <= 0.1 * time_ns else cost.most_common(1)[0][0],
        wait_ns=_known(bucket.wait_ns for bucket in same),
        late_rank=late.most_common(1)[0][0] if late else None,
    )


# Sharded parameters


def _fully_sharded(parts: list[tuple[int, RankFullySharded]]) -> FullySharded:
    own = [part for _, part in parts]
    step_ns = mean([part.step_ns for part in own])
    exposed = mean([part.exposed_ns for part in own])
    groups = _groups(part.groups for part in own)
    replicate = _groups(part.replicate_groups for part in own)
    blocks: dict[tuple[str, str, str], list[ShardedBlock]] = {}
    for part in own:
        for block in part.blocks:
            blocks.setdefault((block.name, block.operation, block.phase), []).append(block)
    shares = [part.prefetched_share for part in own if part.prefetched_share is not None]
    held = [part.memory for part in own if part.memory is not None]
    return FullySharded(
        flavour=own[0].flavour,
        stage=own[0].stage,
        ranks=_ranks(parts),
        size=_size(groups),
        replicas=_size(replicate) if replicate else 1,
        groups=groups,
        replicate_groups=replicate,
        evidence=_distinct(word for part in own for word in part.evidence),
        step_ns=step_ns,
        comm_ns=mean([part.comm_ns for part in own]),
        exposed_ns=exposed,
        exposed_share=_share(exposed, step_ns),
        blocks=tuple(_block(same) for same in blocks.values()),
        prefetched_share=sum(shares) / len(shares) if shares else None,
        memory=max(held, key=lambda memory: memory.measured_bytes or 0) if held else None,
    )


def _block(same: list[ShardedBlock]) -> ShardedBlock:
    known = [block.prefetched for block in same if block.prefetched is not None]
    return replace(
        same[0],
        count=sum(block.count for block in same) / len(same),
        size_bytes=_known(block.size_bytes for block in same),
        time_ns=mean([block.time_ns for block in same]),
        exposed_ns=mean([block.exposed_ns for block in same]),
        lead_ns=_known(block.lead_ns for block in same),
        prefetched=sum(known) * 2 > len(known) if known else None,
    )


# Tensor parallelism


def _tensor_parallel(parts: list[tuple[int, RankTensorParallel]]) -> TensorParallel:
    own = [part for _, part in parts]
    step_ns = mean([part.step_ns for part in own])
    comm, exposed = (
        mean([getattr(part, name) for part in own]) for name in ("comm_ns", "exposed_ns")
    )
    groups = _groups(part.groups for part in own)
    layers: dict[str, list[Layer]] = {}
    for part in own:
        for layer in part.layers:
            layers.setdefault(layer.name, []).append(layer)
    split = [part.split_parameters for part in own if part.split_parameters is not None]
    return TensorParallel(
        ranks=_ranks(parts),
        size=_size(groups),
        groups=groups,
        evidence=_distinct(word for part in own for word in part.evidence),
        step_ns=step_ns,
        forward_count=sum(part.forward_count for part in own) / len(own),
        backward_count=sum(part.backward_count for part in own) / len(own),
        size_bytes=_known(part.size_bytes for part in own),
        comm_ns=comm,
        comm_share=_share(comm, step_ns),
        exposed_ns=exposed,
        exposed_share=_share(exposed, step_ns),
        split_parameters=max(split) if split else None,
        layers=tuple(_layer(same) for same in layers.values()),
    )


def _layer(same: list[Layer]) -> Layer:
    return replace(
        same[0],
        forward_count=sum(layer.forward_count for layer in same) / len(same),
        backward_count=sum(layer.backward_count for layer in same) / len(same),
        time_ns=mean([layer.time_ns for layer in same]),
        exposed_ns=mean([layer.exposed_ns for layer in same]),
    )


# Pipelines


def _pipelines(parts: list[tuple[int, RankPipeline]]) -> list[Pipeline]:
    """One record for all replicas: ranks with the same stages are one stage."""
    if not parts:
        return []
    held: dict[tuple[int, ...], list[tuple[int, RankPipeline]]] = {}
    for rank, part in sorted(parts, key=lambda pair: pair[0]):
        held.setdefault(part.stage_indices or (_place(rank, part),), []).append((rank, part))
    order = sorted(held)
    stages = tuple(_stage(indices, held[indices]) for indices in order)
    groups = _groups(own.groups for _, own in parts)
    size = _size(groups) or len(stages)
    replicas = max(len(same) for same in held.values())
    ranks_parts = [part for _, part in parts]
    microbatches = _microbatches(ranks_parts, complete=len(stages) == size)
    compute = [stage.compute_ns for stage in stages]
    average = sum(compute) / len(compute)
    imbalance = max(compute) / average if average else 1.0
    several = max(len(part.stage_indices) for part in ranks_parts)
    return [
        Pipeline(
            ranks=_ranks(parts),
            size=size,
            replicas=replicas,
            groups=groups,
            evidence=_distinct(word for part in ranks_parts for word in part.evidence),
            schedule=_schedule(ranks_parts, several),
            microbatches=microbatches,
            stages=stages,
            bubble_share=sum(stage.bubble_share for stage in stages) / len(stages),
            bound_share=bound(size, microbatches * max(1, several)) if microbatches else None,
            imbalance=imbalance,
            deciding_stage=compute.index(max(compute)) if imbalance > _ALIKE else None,
        )
    ]


def bound(stages: int, microbatches: int) -> float:
    """The least share of the step that filling and draining costs when all stages are equal."""
    return (stages - 1) / (microbatches + stages - 1)


def _place(rank: int, part: RankPipeline) -> int:
    """A rank's place in the group, used when its stage is unknown."""
    ranks = part.groups[0].ranks if part.groups else ()
    return ranks.index(rank) if rank in ranks else rank


def _stage(indices: tuple[int, ...], same: list[tuple[int, RankPipeline]]) -> Stage:
    own = [part for _, part in same]

    def average(name: str) -> int:
        return mean([getattr(part, name) for part in own])

    return Stage(
        stage_indices=indices,
        ranks=_ranks(same),
        step_ns=average("step_ns"),
        compute_ns=average("compute_ns"),
        other_comm_ns=average("other_comm_ns"),
        bubble_ns=average("bubble_ns"),
        bubble_share=_share(average("bubble_ns"), average("step_ns")),
        receive_wait_ns=average("receive_wait_ns"),
    )


def _microbatches(own: list[RankPipeline], *, complete: bool) -> int | None:
    """As annotated; else what the pipeline's ends receive, once per micro-batch."""
    annotated = [part.microbatches for part in own if part.microbatches]
    if annotated:
        return max(annotated)
    fewest = min(part.receives for part in own)
    return round(fewest) if complete and fewest >= 1 else None


def _schedule(own: list[RankPipeline], several: int) -> Schedule | None:
    if several > 1:
        return "interleaved"
    if max(part.late_forward_share for part in own) > _LATE:
        return "one forward one backward"
    return "fill and drain"


# What is left


def _other(parts: list[tuple[int, RankOtherCommunication]]) -> OtherCommunication:
    own = [part for _, part in parts]
    step_ns = mean([part.step_ns for part in own])
    exposed = mean([part.exposed_ns for part in own])
    uses: dict[tuple[str, str, str], list[Use]] = {}
    for part in own:
        for use in part.uses:
            uses.setdefault((use.operation, use.group.name, use.caller), []).append(use)
    merged = [
        replace(
            same[0],
            count=sum(use.count for use in same) / len(own),
            time_ns=round(sum(use.time_ns for use in same) / len(own)),
            exposed_ns=round(sum(use.exposed_ns for use in same) / len(own)),
        )
        for same in uses.values()
    ]
    return OtherCommunication(
        ranks=_ranks(parts),
        step_ns=step_ns,
        comm_ns=mean([part.comm_ns for part in own]),
        exposed_ns=exposed,
        exposed_share=_share(exposed, step_ns),
        uses=tuple(sorted(merged, key=lambda use: -use.time_ns)),
    )
