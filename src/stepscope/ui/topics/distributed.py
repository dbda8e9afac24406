"""Put a job of several ranks into words: who holds the others back, how well clocks agree,
how the model is spread over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec

from stepscope.explain.job.hosts import unkept_hosts, unkept_words
from stepscope.records.job import (
    Clock,
    CriticalPath,
    HierarchicalAllReduce,
    Job,
    JobCollective,
    LastArriver,
    Straggler,
    Stragglers,
)
from stepscope.records.rank_facts import NetworkPlace
from stepscope.records.strategies import (
    Bucket,
    DataParallel,
    FullySharded,
    OtherCommunication,
    Pipeline,
    Strategy,
    TensorParallel,
)
from stepscope.text.figures import duration, factor, percent, significant, size
from stepscope.text.words import counted, sentence

Tone = Literal["good", "bad", "open"]

CAUSES = {"compute": "slow compute", "input": "slow input", "link": "slow link"}
NOT_ALIGNED = "the ranks' clocks are not aligned, so the order of arrivals is not known"
NOTHING_SHARED = "no two ranks recorded a collective in which ranks wait for each other"
WITHIN_ERROR = "no rank arrived last by more than the clock's error bar"
_SEEN_DRIFT_PPM = 0.1
_TONES: dict[str, Tone] = {"none": "good", "found": "bad"}


def straggler_name(straggler: Straggler) -> str:
    """The rank, the host, the link between two hosts, or the group of a slow link."""
    if straggler.rank is not None:
        return f"rank {straggler.rank}"
    if straggler.link is not None:
        return f"the link from {straggler.link[0]} to {straggler.link[1]}"
    return f"group {straggler.group}" if straggler.cause == "link" else str(straggler.host)


def rank_on_host(rank: int, job: Job) -> str:
    """rank 3 on node1, where the ranks are on several hosts."""
    several = len(set(job.hosts.values())) > 1
    return f"rank {rank} on {job.hosts[rank]}" if several and rank in job.hosts else f"rank {rank}"


def place_words(place: NetworkPlace | None) -> str:
    """Where a host stands in the network, as far as it is known."""
    if place is None:
        return ""
    parts = (("rack", place.rack), ("switch", place.switch))
    return ", ".join(f"{kind} {name}" for kind, name in parts if name)


def straggler_words(stragglers: Stragglers) -> str:
    """The verdict in one sentence."""
    if stragglers.verdict == "found":
        return _accusation(stragglers.ranks)
    if stragglers.verdict == "none":
        nobody = f"No rank holds the others back: {stragglers.detail or 'none stands out'}"
        return f"{nobody}{_wandering(stragglers.wandering)}."
    if stragglers.verdict == "one rank only":
        return "Only one rank was recorded, so there is no other rank to compare it with."
    reason = stragglers.detail or "too little was recorded"
    return f"Whether a rank holds the others back is not known: {reason}."


def straggler_tone(stragglers: Stragglers) -> Tone:
    """Good, bad, or open."""
    return _TONES.get(stragglers.verdict, "open")


def _wandering(straggler: Straggler | None) -> str:
    if straggler is None or straggler.excess_ms is None:
        return ""
    return (
        f"; in 1 step of {straggler.one_in} some rank is {duration(straggler.excess_ms * 1e6)} "
        f"late, each time another one, which costs {duration(straggler.cost_ms * 1e6)} a step"
    )


def _what(worst: Straggler) -> str:
    if worst.excess_ms is not None:
        often = "at every step" if worst.one_in is None else f"in 1 step of {worst.one_in}"
        its, waits = f"its {len(worst.ranks)} ranks are", "they wait"
        if worst.scope == "rank":
            its, waits = "it is", "it waits"
        why = f", as {waits} for data" if worst.cause == "input" else ""
        return f"{its} late by {duration(worst.excess_ms * 1e6)} {often}{why}"
    times = factor(worst.slowdown)
    if worst.link is not None:
        return f"the other links are {times} times as fast"
    return {
        "compute": f"its own work takes {times} times as long as the other ranks'",
        "input": f"it waits for its data and takes {times} times as long as the others",
        "link": f"its transfers take {times} times as long as they should",
    }[worst.cause]


def _accusation(stragglers: tuple[Straggler, ...]) -> str:
    worst = stragglers[0]
    name = straggler_name(worst)
    also = f"; {len(stragglers) - 1} more: see the table" if len(stragglers) > 1 else ""
    return (
        f"{sentence(name)} holds the others back: {_what(worst)}, which costs "
        f"{duration(worst.cost_ms * 1e6)} a step{also}."
    )


def clock_words(clock: Clock) -> str:
    """How well the ranks' clocks agree, and how that is known."""
    if not clock.aligned:
        return f"Clocks are not aligned: {clock.detail or 'nothing ties the ranks together'}."
    others = [error for rank, error in clock.error_ns.items() if rank != clock.reference]
    worst = max(others, default=0)
    typical = median(others) if others else 0
    bar = error_words(worst)
    if len(others) > 3 and typical < 0.7 * worst:
        bar += f" (typically {error_words(typical)})"
    return f"Clocks are aligned within {bar}, {clock.detail}.{_drift_words(clock)}"


def host_clock_words(clock: Clock) -> str:
    """What to do about a host whose clock nobody keeps, and why meetings failed; often nothing."""
    adrift = unkept_hosts(clock)
    lines = [unkept_words(adrift)] if adrift else []
    return " ".join(f"{sentence(line)}." for line in [*lines, *clock.notes[:1]])


def _drift_words(clock: Clock) -> str:
    """The fastest drift between hosts, where several meetings show it."""
    known = [(abs(host.drift_ppm or 0.0), host) for host in clock.hosts if host.meetings > 1]
    drift, host = max(known, key=lambda pair: pair[0], default=(0.0, None))
    if host is None or drift < _SEEN_DRIFT_PPM:
        return ""
    apart = f" that of {host.host} by {significant(drift)} ppm"
    return f" They drift apart over the run,{apart} ({counted(host.meetings, 'meeting')})."


def path_words(path: CriticalPath, most: int = 3) -> str:
    """What the critical path consists of, the largest share first."""
    shares = [(share, f"rank {rank}'s work") for rank, share in path.share_by_rank.items()]
    shares.append((path.transfer_share, "transfers"))
    shares = sorted((row for row in shares if row[0] >= 0.005), reverse=True)
    parts = [f"{what} {percent(share)}" for share, what in shares[:most]]
    rest = sum(share for share, _ in shares[most:])
    if rest >= 0.005:
        parts.append(f"other ranks' work {percent(rest)}")
    return ", ".join(parts)


def group_words(row: JobCollective) -> str:
    """torch's name of the group, and its purpose if the trace has it."""
    return f"{row.group} {row.description}".strip() or "-"


def resolved(row: JobCollective) -> bool | None:
    """Whether the wait exceeds the clock's error bar; None without aligned clocks."""
    if row.wait_ns is None or row.wait_error_ns is None:
        return None
    return row.wait_ns > row.wait_error_ns


def wait_words(row: JobCollective) -> str:
    """One call's wait with its error bar, or the error bar alone if the wait is smaller."""
    clear = resolved(row)
    if clear is None or row.wait_ns is None or row.wait_error_ns is None:
        return "-"
    error = error_words(row.wait_error_ns / row.count)
    return f"{duration(row.wait_ns / row.count)} {error}" if clear else f"within {error}"


def own_wait_words(row: LastArriver) -> str:
    """A rank's waiting in a step with its error bar, or the error bar alone if it is smaller."""
    if not row.wait_error_ns:
        return duration(row.waits_ns)
    error = error_words(row.wait_error_ns)
    clear = row.waits_ns > row.wait_error_ns
    return f"{duration(row.waits_ns)} ({error})" if clear else f"within {error}"


def error_words(ns: float) -> str:
    return f"±{duration(ns)}"


def no_arrivals(job: Job) -> str:
    """Why the last rank to arrive is not known; empty if it is."""
    if any(row.times_last for row in job.arrivals):
        return ""
    if not job.clock.aligned:
        return NOT_ALIGNED
    return WITHIN_ERROR if job.arrivals else NOTHING_SHARED


# How the job is spread over its ranks, in words: a heading and a table per strategy.

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
