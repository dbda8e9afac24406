"""Data parallelism: gradients summed in buckets while backward runs, in which passes, and
why some time is exposed.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.explain.strategies.evidence import (
    Bools,
    Int64,
    StrategyEvidence,
    backward_spans,
    common_size,
    mean,
)
from stepscope.records.strategies import Bucket, RankDataParallel, Why
from stepscope.records.trace import HostKind, Trace
from stepscope.step import intervals
from stepscope.step.intervals import Set
from stepscope.step.work import rows_named
from stepscope.trace.links import distinct

# DDP is known from its annotation or from the capture; a bare trace shows it as all-reduces that
# backward calls. Buckets are distinguished by their place in the step.

_MOST = 0.1  # a smaller share of a bucket's time does not count


def find(evidence: StrategyEvidence, free: Bools) -> tuple[RankDataParallel | None, Bools]:
    """All-reduces of the gradients' group that backward calls; DDP's broadcasts of buffers."""
    replicas = evidence.layout.get("ddp") or []
    layout = [bucket for replica in replicas for bucket in replica.get("buckets", ())]
    reduces = free & evidence.of_kind("all_reduce")
    mine = reduces & evidence.backward
    named = reduces & evidence.of_groups({str(replica.get("group")) for replica in replicas})
    sizes = [size for bucket in layout if (size := bucket.get("size_bytes"))]
    sized = named & np.isin(evidence.size_bytes, sizes)
    mine = sized if sized.any() else mine & named if named.any() else mine
    if not mine.any():
        return None, mine
    buffers = evidence.inside(lambda name: name == FORWARD) >= 0
    every = mine | (free & buffers & evidence.of_kind("broadcast"))
    steps, places = _grid(evidence, mine)
    backward = _backward(evidence, steps, places)
    names = _names(layout, evidence.size_bytes[places[0]].tolist())
    passes, early = find_exchanging_passes(evidence, mine)
    return RankDataParallel(
        groups=evidence.groups_of(mine),
        evidence=_describe(evidence, replicas),
        step_ns=evidence.step_ns,
        backward_ns=mean(backward[1] - backward[0]) if backward else None,
        comm_ns=evidence.comm_ns(every),
        exposed_ns=evidence.exposed_comm_ns(every),
        steps=tuple(evidence.pace.number[steps].tolist()),
        buckets=_buckets(evidence, places, backward, names),
        arrivals_ns=tuple(map(tuple, evidence.ready_ns[places].tolist())),
        passes=passes,
        early_exposed_ns=evidence.exposed_comm_ns(early),
    ), every


def _describe(evidence: StrategyEvidence, replicas: list[dict[str, Any]]) -> tuple[str, ...]:
    trace, host = evidence.trace, evidence.trace.host
    out = [
        f"DistributedDataParallel of {replica.get('module')} over {replica.get('world_size')} ranks"
        for replica in replicas
    ]
    named = rows_named(trace, host, host.kind == HostKind.ANNOTATION, lambda s: s == FORWARD)
    if not out and named.any():
        out.append(f"{FORWARD} is annotated")
    return tuple(out) or ("all-reduces called by backward",)


def _grid(evidence: StrategyEvidence, mine: Bools) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Calls as (steps, buckets), for the steps with the usual number of calls."""
    calls = np.flatnonzero(mine)
    step = evidence.step[calls]
    counts = np.bincount(step, minlength=len(evidence.pace))
    usual = int(np.bincount(counts[counts > 0]).argmax())
    steps = np.flatnonzero(counts == usual)
    chosen = calls[np.isin(step, steps)]
    order = np.lexsort((evidence.made_ns[chosen], evidence.step[chosen]))
    return steps, chosen[order].reshape(len(steps), usual)


def _names(buckets: list[dict[str, Any]], sizes: list[int]) -> list[tuple[str, ...]]:
    """The parameters of each bucket, if the capture lists the same buckets as the trace."""
    if [bucket.get("size_bytes") for bucket in buckets] != sizes:
        return [()] * len(sizes)
    return [tuple(bucket.get("parameters") or ()) for bucket in buckets]


def _backward(
    evidence: StrategyEvidence, steps: NDArray[np.intp], places: NDArray[np.intp]
) -> tuple[Int64, Int64] | None:
    """Per step: when the backward that fills the first bucket began and ended."""
    mine, others = backward_spans(evidence)
    if not len(mine[0]):
        return None
    ends = evidence.pace.start_ns[steps] + evidence.pace.dur_ns[steps]
    first = evidence.ready_ns[places[:, 0]]
    forward = _last(others, first, evidence.pace.start_ns[steps])
    begin = mine[0][np.minimum(np.searchsorted(mine[0], forward), len(mine[0]) - 1)]
    last = np.maximum(np.searchsorted(mine[0], ends) - 1, 0)
    return np.minimum(begin, first), np.maximum(np.minimum(mine[1][last], ends), first)


def _last(of: Set, times: Int64, floor: Int64) -> Int64:
    """The last end before each time, but not before the floor."""
    if not len(of[0]):
        return floor
    place = np.searchsorted(of[1], times, side="right") - 1
    return np.where(place >= 0, np.maximum(of[1][np.maximum(place, 0)], floor), floor)


def _buckets(
    evidence: StrategyEvidence,
    places: NDArray[np.intp],
    backward: tuple[Int64, Int64] | None,
    names: list[tuple[str, ...]],
) -> tuple[Bucket, ...]:
    start, end, ready = (
        column[places] for column in (evidence.start_ns, evidence.end_ns, evidence.ready_ns)
    )
    exposed = evidence.exposed_ns[places]
    begin = backward[0][:, None] if backward else ready[:, :1]
    done = backward[1][:, None] if backward else np.maximum(ready[:, -1:], start[:, -1:])
    left = _covered(evidence, start, np.maximum(start, done))
    bare = end - start - _covered(evidence, start, end)  # also while an earlier bucket runs
    before = np.maximum.accumulate(end, axis=1)
    out = []
    for index in range(places.shape[1]):
        times = {"ready_ns": ready, "start_ns": start, "end_ns": end}
        time_ns = mean((end - start)[:, index])
        out.append(
            Bucket(
                index=index,
                size_bytes=common_size(evidence.size_bytes[places[:, index]]),
                parameters=names[index],
                **{
                    name: mean((at - begin)[:, index]) if backward else None
                    for name, at in times.items()
                },
                time_ns=time_ns,
                exposed_ns=mean(exposed[:, index]),
                why=_why(
                    time_ns=time_ns,
                    exposed_ns=mean(bare[:, index]),
                    queued_ns=mean((start - ready)[:, index]),
                    after_ns=mean(start[:, index] - before[:, index - 1]) if index else None,
                    left_ns=mean(left[:, index]),
                ),
            )
        )
    return tuple(out)


def _covered(evidence: StrategyEvidence, start: Int64, end: Int64) -> Int64:
    """Compute between these times, in their shape."""
    flat = intervals.covered(evidence.work.compute, start.reshape(-1), end.reshape(-1))
    return flat.reshape(start.shape)


def _why(
    *, time_ns: int, exposed_ns: int, queued_ns: int, after_ns: int | None, left_ns: int
) -> Why:
    """`after_ns`: since earlier buckets ended; `left_ns`: backward's compute after its start."""
    small = _MOST * time_ns
    if exposed_ns <= small:
        return "hidden"
    if after_ns is not None and after_ns <= small and queued_ns >= exposed_ns / 2:
        return "queued"
    if left_ns <= small:
        return "last"
    return "long" if left_ns < time_ns else "gaps"


# Which backward passes of a step exchange gradients.
#
# A pass is known from the forward of DDP before it. Several passes belong to one update only if the
# same buckets come again and no optimizer steps in between.

FORWARD = "DistributedDataParallel.forward"
_UPDATE = re.compile(r"^Optimizer\.step#")


def find_exchanging_passes(evidence: StrategyEvidence, reduces: Bools) -> tuple[int, Bools]:
    """How many passes of a usual step exchange gradients, and the calls of all but the last."""
    early = np.zeros(len(evidence), bool)
    # When the host began each forward of DDP.
    host = evidence.trace.host
    named = rows_named(
        evidence.trace, host, host.kind == HostKind.ANNOTATION, lambda s: s == FORWARD
    )
    forwards = np.sort(host.start_ns[named])
    if not len(forwards):
        return 1, early
    pass_of = np.searchsorted(forwards, evidence.made_ns, side="right") - 1
    updates = _update_ends(evidence.trace)
    counts: list[int] = []
    for step in distinct(evidence.step[reduces]).tolist():
        calls = np.flatnonzero(reduces & (evidence.step == step))
        passes = distinct(pass_of[calls])
        times = forwards[passes]
        is_one_update = (
            passes[0] >= 0
            and not ((updates > times[0]) & (updates < times[-1])).any()
            and _same_sizes(evidence.size_bytes[calls], pass_of[calls])
        )
        counts.append(len(passes) if is_one_update else 1)
        if is_one_update:
            early[calls] = pass_of[calls] < passes[-1]
    usual = int(np.bincount(counts).argmax()) if counts else 1
    return usual, early if usual > 1 else np.zeros(len(evidence), bool)


def _update_ends(trace: Trace) -> Int64:
    host = trace.host
    named = rows_named(trace, host, host.kind <= HostKind.ANNOTATION, _UPDATE.match)
    return (host.start_ns + host.dur_ns)[named]


def _same_sizes(sizes: Int64, pass_of: Int64) -> bool:
    """Whether every pass exchanges buckets of the same sizes."""
    passes = [sorted(sizes[pass_of == one].tolist()) for one in distinct(pass_of).tolist()]
    return all(one == passes[0] for one in passes)
