"""Join the strategies of all ranks: means over ranks, late ranks, stages in order; in
milliseconds of the step of record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepscope.explain.strategies.evidence import mean
from stepscope.records.explanation import Budget
from stepscope.records.job import Clock, Group, RankSteps
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
    RankStrategy,
    RankTensorParallel,
    Schedule,
    ShardedBlock,
    Stage,
    Strategy,
    TensorParallel,
    Why,
)

if TYPE_CHECKING:
    Parts = Sequence[tuple[int, tuple[RankStrategy, ...]]]

_T = TypeVar("_T")
_K = TypeVar("_K")
_ALIKE = 1.05  # stages whose compute differs less are balanced
_NO_CLOCK = Clock(aligned=False)
_LATE = 0.1  # share of forward's compute from which forwards and backwards alternate


def join_strategies(parts: Parts, clock: Clock = _NO_CLOCK) -> tuple[Strategy, ...]:
    """One record per strategy (data parallelism: one per layout of buckets), in a fixed order."""
    joined: list[Strategy] = [*_pipelines(_select(parts, RankPipeline))]
    if sharded := _select(parts, RankFullySharded):
        joined.append(_fully_sharded(sharded))
    if tensor := _select(parts, RankTensorParallel):
        joined.append(_tensor_parallel(tensor))
    # Ranks of one group wait for each other; groups with the same buckets share a record.
    cohorts = _by(_select(parts, RankDataParallel), lambda pair: _first_group(pair[1])).values()
    waited = [pair for cohort in cohorts for pair in _with_waits(cohort, clock)]
    joined += [
        _replicas(same)
        for same in _by(
            waited,
            lambda pair: tuple(
                (bucket.size_bytes, bucket.parameters) for bucket in pair[1].buckets
            ),
        ).values()
    ]
    if others := _select(parts, RankOtherCommunication):
        joined.append(_other(others))
    return tuple(joined)


def _select(parts: Parts, kind: type[_T]) -> list[tuple[int, _T]]:
    return [
        (rank, strategy) for rank, own in parts for strategy in own if isinstance(strategy, kind)
    ]


def _by(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    grouped: dict[_K, list[_T]] = {}
    for item in items:
        grouped.setdefault(key(item), []).append(item)
    return grouped


def _ranks(parts: Sequence[tuple[int, object]]) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, _ in parts))


def _groups(of: Iterable[tuple[Group, ...]]) -> tuple[Group, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(of)))


def _size(groups: Sequence[Group]) -> int | None:
    sizes = {group.size for group in groups if group.size}
    return sizes.pop() if len(sizes) == 1 else None


def _members(parts: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    """Who takes part, and how that is known."""
    groups = _groups(part.groups for _, part in parts)
    evidence = dict.fromkeys(word for _, part in parts for word in part.evidence)
    return {
        "ranks": _ranks(parts),
        "size": _size(groups),
        "groups": groups,
        "evidence": tuple(evidence),
    }


def _times(parts: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    """Of the step and its communication."""
    times = _means([part for _, part in parts], "step_ns", "comm_ns", "exposed_ns")
    return {**times, "exposed_share": _share(times["exposed_ns"], times["step_ns"])}


def _means(records: Sequence[object], *names: str) -> dict[str, Any]:
    """Rounded means of fields over the records that know them; None if none does."""
    columns = {name: _known(records, name) for name in names}
    return {name: mean(known) if known else None for name, known in columns.items()}


def _rates(records: Sequence[object], *names: str) -> dict[str, Any]:
    """Means of fields that are no whole numbers."""
    columns = {name: _known(records, name) for name in names}
    return {name: sum(known) / len(known) if known else None for name, known in columns.items()}


def _known(records: Sequence[object], name: str) -> list[Any]:
    return [value for record in records if (value := getattr(record, name)) is not None]


def _share(part_ns: int, step_ns: int) -> float:
    return part_ns / step_ns if step_ns else 0.0


# Data parallelism


def _first_group(part: RankDataParallel) -> tuple[int, ...] | str:
    return (part.groups[0].ranks or part.groups[0].name) if part.groups else ""


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
    waits = (came.max(axis=0) - came).mean(axis=1)
    late = [cohort[np.bincount(places).argmax()][0] for places in came.argmax(axis=0).T]
    known = {rank: clock.error_ns.get(rank, 0) for rank, _ in cohort}
    errors = {
        rank: own + max(error for other, error in known.items() if other != rank)
        for rank, own in known.items()
    }
    out = []
    for (rank, part), wait in zip(cohort, waits, strict=True):
        buckets = tuple(
            _blame(bucket, round(float(wait[i])), late[i], rank, errors[rank])
            for i, bucket in enumerate(part.buckets)
        )
        out.append((rank, replace(part, buckets=buckets)))
    return out


def _blame(bucket: Bucket, wait_ns: int, late: int, rank: int, error_ns: int) -> Bucket:
    waited = wait_ns > error_ns and wait_ns >= bucket.exposed_ns / 2 and late != rank
    why: Why = "late rank" if waited and bucket.why != "hidden" else bucket.why
    return replace(bucket, wait_ns=wait_ns, wait_error_ns=error_ns, late_rank=late, why=why)


def _replicas(parts: list[tuple[int, RankDataParallel]]) -> DataParallel:
    own = [part for _, part in parts]
    same_buckets = zip(*(part.buckets for part in own), strict=True)
    return DataParallel(
        **_members(parts),
        **_times(parts),
        **_means(own, "backward_ns"),
        buckets=tuple(map(_bucket, same_buckets)),
    )


def _bucket(same: Sequence[Bucket]) -> Bucket:
    """Means; the cause that costs most over all ranks."""
    cost: Counter[Why] = Counter()
    for bucket in same:
        cost[bucket.why] += bucket.exposed_ns
    names = ("ready_ns", "start_ns", "end_ns", "time_ns", "exposed_ns", "wait_ns", "wait_error_ns")
    joined = replace(same[0], **_means(same, *names))
    hidden = joined.exposed_ns <= 0.1 * joined.time_ns
    late = Counter(_known(same, "late_rank"))
    return replace(
        joined,
        why="hidden" if hidden else cost.most_common(1)[0][0],
        late_rank=late.most_common(1)[0][0] if late else None,
    )


# Sharded parameters


def _fully_sharded(parts: list[tuple[int, RankFullySharded]]) -> FullySharded:
    own = [part for _, part in parts]
    replicate = _groups(part.replicate_groups for part in own)
    blocks = _by(
        (block for part in own for block in part.blocks),
        lambda block: (block.name, block.operation, block.phase),
    )
    held = _known(own, "memory")
    return FullySharded(
        flavour=own[0].flavour,
        stage=own[0].stage,
        replicas=_size(replicate) if replicate else 1,
        replicate_groups=replicate,
        **_members(parts),
        **_times(parts),
        **_rates(own, "prefetched_share"),
        blocks=tuple(map(_block, blocks.values())),
        memory=max(held, key=lambda memory: memory.measured_bytes or 0) if held else None,
    )


def _block(same: list[ShardedBlock]) -> ShardedBlock:
    known = _known(same, "prefetched")
    return replace(
        same[0],
        **_rates(same, "count"),
        **_means(same, "size_bytes", "time_ns", "exposed_ns", "lead_ns"),
        prefetched=sum(known) * 2 > len(known) if known else None,
    )


# Tensor parallelism


def _tensor_parallel(parts: list[tuple[int, RankTensorParallel]]) -> TensorParallel:
    own = [part for _, part in parts]
    layers = _by((layer for part in own for layer in part.layers), lambda layer: layer.name)
    times = _times(parts)
    return TensorParallel(
        **_members(parts),
        **times,
        **_rates(own, "forward_count", "backward_count"),
        **_means(own, "size_bytes"),
        comm_share=_share(times["comm_ns"], times["step_ns"]),
        split_parameters=max(_known(own, "split_parameters"), default=None),
        layers=tuple(map(_layer, layers.values())),
    )


def _layer(same: list[Layer]) -> Layer:
    counts = _rates(same, "forward_count", "backward_count")
    return replace(same[0], **counts, **_means(same, "time_ns", "exposed_ns"))


# Pipelines


def _pipelines(parts: list[tuple[int, RankPipeline]]) -> list[Pipeline]:
    """One record for all replicas: ranks with the same stages are one stage."""
    if not parts:
        return []
    held = _by(
        sorted(parts, key=lambda pair: pair[0]),
        lambda pair: pair[1].stage_indices or (_place(*pair),),
    )
    stages = tuple(_stage(indices, held[indices]) for indices in sorted(held))
    members = _members(parts)
    size = members["size"] = members["size"] or len(stages)
    own = [part for _, part in parts]
    microbatches = _microbatches(own, complete=len(stages) == size)
    compute = [stage.compute_ns for stage in stages]
    average = sum(compute) / len(compute)
    imbalance = max(compute) / average if average else 1.0
    several = max(len(part.stage_indices) for part in own)
    return [
        Pipeline(
            **members,
            replicas=max(map(len, held.values())),
            schedule=_schedule(own, several),
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
    names = ("step_ns", "compute_ns", "other_comm_ns", "bubble_ns", "receive_wait_ns")
    times = _means([part for _, part in same], *names)
    share = _share(times["bubble_ns"], times["step_ns"])
    return Stage(stage_indices=indices, ranks=_ranks(same), bubble_share=share, **times)


def _microbatches(own: list[RankPipeline], *, complete: bool) -> int | None:
    """As annotated; else what the pipeline's ends receive, once per micro-batch."""
    if annotated := max(part.microbatches or 0 for part in own):
        return annotated
    fewest = min(part.receives for part in own)
    return round(fewest) if complete and fewest >= 1 else None


def _schedule(own: list[RankPipeline], several: int) -> Schedule:
    if several > 1:
        return "interleaved"
    if max(part.late_forward_share for part in own) > _LATE:
        return "one forward one backward"
    return "fill and drain"


# What is left


def _other(parts: list[tuple[int, RankOtherCommunication]]) -> OtherCommunication:
    uses = _by(
        (use for _, part in parts for use in part.uses),
        lambda use: (use.operation, use.group.name, use.caller),
    )
    merged = [
        replace(
            same[0],
            count=sum(use.count for use in same) / len(parts),
            time_ns=round(sum(use.time_ns for use in same) / len(parts)),
            exposed_ns=round(sum(use.exposed_ns for use in same) / len(parts)),
        )
        for same in uses.values()
    ]
    ranked = sorted(merged, key=lambda use: -use.time_ns)
    return OtherCommunication(ranks=_ranks(parts), **_times(parts), uses=tuple(ranked))


# Strategies in milliseconds of the step of record, as the budget has it.
#
# A strategy is measured in the profiler's window. The budget scales that window to the step of
# record: device work by one factor, the host's idle time by another. Communication is scaled by the
# device's factor, so that the strategies' exposed communication adds up to the budget's. A
# pipeline's bubble contains idle time too, so its stages are scaled as a whole, with unchanged
# shares.

_S = TypeVar("_S", bound=Struct)


def strategy_of_record(strategy: Strategy, budget: Budget, paces: Sequence[RankSteps]) -> Strategy:
    """`paces` are the windows of the ranks that the budget and the strategy average over."""
    paces = [pace for pace in paces if len(pace)]
    step_ns = sum(float(pace.dur_ns.mean()) for pace in paces) / max(1, len(paces))
    if not step_ns or not budget.step_ms:
        return strategy
    whole = 1e6 * budget.step_ms
    if isinstance(strategy, Pipeline):
        return _scaled(strategy, whole / step_ns)
    of_comm = _comm_factor(budget, paces) or whole / step_ns
    scaled: Strategy = _communication(strategy, of_comm, round(whole))
    return scaled


def _comm_factor(budget: Budget, paces: Sequence[RankSteps]) -> float | None:
    """From the window to the step of record: exposed communication's factor, else compute's."""
    ms = {part.id: part.ms for part in budget.parts}
    exposed = sum(float(pace.exposed_comm_ns.mean()) for pace in paces) / len(paces)
    if exposed and ms["exposed_comm"]:
        return 1e6 * ms["exposed_comm"] / exposed
    computing = sum(float(pace.compute_ns.mean()) for pace in paces) / len(paces)
    return 1e6 * ms["compute"] / computing if computing and ms["compute"] else None


def _communication(strategy: Any, factor: float, step_ns: int) -> Any:
    """Scale all of its times, and recompute its shares."""
    scaled = replace(_scaled(strategy, factor), step_ns=step_ns)
    scaled = replace(scaled, exposed_share=scaled.exposed_ns / step_ns)
    if isinstance(scaled, TensorParallel):
        return replace(scaled, comm_share=scaled.comm_ns / step_ns)
    return scaled


def _scaled(record: _S, factor: float) -> _S:
    """Scale all fields in nanoseconds, including those of nested records."""
    changed: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name.endswith("_ns") and value is not None:
            changed[name] = round(value * factor)
        elif isinstance(value, tuple) and value and isinstance(value[0], Struct):
            changed[name] = tuple(_scaled(inner, factor) for inner in value)
    return replace(record, **changed)
