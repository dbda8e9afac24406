"""How the job is spread over its ranks, in words: a heading and a table per strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.records.figures import duration, percent, significant, size
from stepscope.records.strategies import (
    DataParallel,
    FullySharded,
    OtherCommunication,
    Pipeline,
    TensorParallel,
)
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.hierarchical import HierarchicalAllReduce
    from stepscope.records.strategies import Bucket, Strategy

TITLES = {
    DataParallel: "data parallel",
    FullySharded: "fully sharded",
    TensorParallel: "tensor parallel",
    Pipeline: "pipeline",
    OtherCommunication: "other communication",
}
WHY = {
    "hidden": "overlaps with compute",
    "last": "no compute left to overlap with",
    "queued": "queued after an earlier bucket",
    "long": "longer than the compute left",
    "late rank": "waits for another rank",
    "gaps": "compute pauses meanwhile",
}

_HIERARCHICAL = ("inside_ns", "between_ns")
_Table = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy, ready to be shown."""

    title: str
    heading: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""


def describe_strategies(strategies: Sequence[Strategy], top: int = 8) -> list[Section]:
    """Empty for a job of one rank."""
    sections = []
    for strategy in strategies:
        columns, rows = _table(strategy, top)
        sections.append(
            Section(
                title=TITLES[type(strategy)],
                heading=heading(strategy),
                columns=columns,
                rows=rows,
                note=_memory(strategy) if isinstance(strategy, FullySharded) else "",
            )
        )
    return sections


def describe_hierarchical(reduces: Sequence[HierarchicalAllReduce], top: int = 8) -> list[Section]:
    """All-reduces that go inside hosts first, then between them; empty if there are none."""
    if not reduces:
        return []
    inside, between = (sum(getattr(one, name) for one in reduces) for name in _HIERARCHICAL)
    rows = tuple(
        (
            _size(one.size_bytes),
            f"{one.count:g}",
            f"{one.hosts} x {one.ranks_per_host}",
            duration(one.inside_ns),
            duration(one.between_ns),
            " + ".join(filter(None, (one.reduce, "all_reduce", one.gather)))
            + ("" if one.gather else ", results stay sharded"),
        )
        for one in reduces[:top]
    )
    return [
        Section(
            title="hierarchical all-reduce",
            heading=f"{duration(inside)} inside hosts, {duration(between)} between them, per step",
            columns=("size", "a step", "hosts x ranks", "inside", "between", "what"),
            rows=rows,
        )
    ]


def heading(strategy: Strategy) -> str:
    """The strategy in one line: its size and its cost."""
    match strategy:
        case Pipeline():
            facts = [counted(strategy.size, "stage"), _replicas(strategy.replicas)]
            facts.append(_counted(strategy.microbatches, "micro-batch", "micro-batches"))
            facts.append(strategy.schedule or "")
            least = strategy.bound_share
            facts.append(
                f"bubble {percent(strategy.bubble_share)}"
                + (f" (at least {percent(least)})" if least is not None else "")
            )
        case FullySharded():
            facts = [strategy.flavour, _counted(strategy.size, "shard")]
            facts.append(_replicas(strategy.replicas or 1))
            facts.append(_exposed(strategy))
            if strategy.prefetched_share is not None:
                facts.append(f"{percent(strategy.prefetched_share)} of gathers prefetched")
        case TensorParallel():
            facts = [_counted(strategy.size, "rank"), f"{percent(strategy.comm_share)} of the step"]
            facts.append(_exposed(strategy))
            facts.append(
                f"{strategy.forward_count:g} forward + {strategy.backward_count:g} backward"
            )
        case DataParallel():
            facts = [_counted(strategy.size, "replica"), counted(len(strategy.buckets), "bucket")]
            facts.append(_exposed(strategy))
        case OtherCommunication():
            facts = [_exposed(strategy)]
    return " · ".join(fact for fact in facts if fact)


def _counted(number: int | None, one: str, many: str | None = None) -> str:
    """A number that some traces lack."""
    return counted(number, one, many) if number else f"? {many or one + 's'}"


def _replicas(count: int) -> str:
    return f"x {count} replicas" if count > 1 else ""


def _exposed(strategy: DataParallel | FullySharded | TensorParallel | OtherCommunication) -> str:
    return (
        f"{duration(strategy.exposed_ns)} of {duration(strategy.comm_ns)} exposed "
        f"({percent(strategy.exposed_share)} of the step)"
    )


def _table(strategy: Strategy, top: int) -> _Table:
    match strategy:
        case Pipeline():
            return _stages(strategy)
        case FullySharded():
            return _blocks(strategy, top)
        case TensorParallel():
            return _layers(strategy, top) if strategy.layers else ((), ())
        case DataParallel():
            return _buckets(strategy, top)
        case OtherCommunication():
            return _uses(strategy, top)


def _stages(pipeline: Pipeline) -> _Table:
    rows = tuple(
        (
            _numbers(stage.stage_indices),
            _numbers(stage.ranks),
            duration(stage.compute_ns),
            duration(stage.receive_wait_ns),
            duration(stage.bubble_ns),
            percent(stage.bubble_share),
            "slowest" if place == pipeline.deciding_stage else "",
        )
        for place, stage in enumerate(pipeline.stages)
    )
    return ("stage", "ranks", "compute", "waits for input", "bubble", "share", ""), rows


def _blocks(sharded: FullySharded, top: int) -> _Table:
    rows = []
    for block in sorted(sharded.blocks, key=lambda block: -block.exposed_ns)[:top]:
        ahead = {True: "prefetched", False: "not prefetched", None: ""}[block.prefetched]
        rows.append(
            (
                duration(block.time_ns),
                duration(block.exposed_ns),
                _size(block.size_bytes),
                f"{block.operation} {block.phase}",
                block.name,
                ahead,
            )
        )
    return ("time", "exposed", "size", "what", "block", ""), tuple(rows)


def _memory(sharded: FullySharded) -> str:
    memory, stage = sharded.memory, sharded.stage
    if memory is None:
        return ""
    held = memory.measured_bytes
    measured = f"measured {_size(held)}" if held is not None else "not measured"
    return (
        f"{significant(memory.parameters / 1e6)} M parameters: formula "
        f"{_size(memory.formula_bytes[stage])} at stage {stage}, {measured} a rank"
    )


def _layers(tensor: TensorParallel, top: int) -> _Table:
    rows = tuple(
        (
            duration(layer.time_ns),
            duration(layer.exposed_ns),
            f"{layer.forward_count:g}",
            f"{layer.backward_count:g}",
            layer.name,
        )
        for layer in sorted(tensor.layers, key=lambda layer: -layer.exposed_ns)[:top]
    )
    return ("time", "exposed", "forward", "backward", "module"), rows


def _buckets(parallel: DataParallel, top: int) -> _Table:
    rows = tuple(
        (
            str(bucket.index),
            _size(bucket.size_bytes),
            *(
                "-" if at is None else duration(at)
                for at in (bucket.ready_ns, bucket.start_ns, bucket.end_ns)
            ),
            duration(bucket.exposed_ns),
            _why(bucket),
        )
        for bucket in parallel.buckets[:top]
    )
    return ("bucket", "size", "ready", "start", "end", "exposed", "why"), rows


def _why(bucket: Bucket) -> str:
    if bucket.why == "late rank" and bucket.late_rank is not None:
        return f"waits for rank {bucket.late_rank}"
    return WHY[bucket.why]


def _uses(other: OtherCommunication, top: int) -> _Table:
    rows = tuple(
        (
            duration(use.time_ns),
            duration(use.exposed_ns),
            f"{use.count:g}",
            use.operation,
            use.group.description or use.group.name,
            use.caller,
        )
        for use in other.uses[:top]
    )
    return ("time", "exposed", "calls", "what", "group", "from"), rows


def _numbers(values: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, values[:4]))
    return f"{shown}, … {values[-1]}" if len(values) > 4 else shown


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else size(size_bytes)
