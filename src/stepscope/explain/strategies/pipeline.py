"""Pipelines: a stage's bubble is the step minus its compute, whatever it waits for.

An annotation around a micro-batch includes the wait for its input, so annotations only say how many
micro-batches there are. Communication of other strategies is counted separately.
"""

from __future__ import annotations

import re

import numpy as np

from stepscope.explain.strategies.evidence import Bools, StrategyEvidence, backward_spans, window_of
from stepscope.records.job import Group
from stepscope.records.strategies import RankPipeline
from stepscope.records.trace import HostKind
from stepscope.step import intervals
from stepscope.step.work import rows_named
from stepscope.text.words import counted

_MICROBATCH = re.compile(r"^(?:Forward|Backward) (\d{1,9})$|^PP:\d+[A-Z_]+?(\d{1,9})$")
_PIPELINE = re.compile(r"pp|pipe|stage", re.IGNORECASE)
_RING = re.compile(r"(?:^|[_\W])(?:cp|context|ring)(?:$|[_\W])", re.IGNORECASE)
_SOME_COMPUTE_NS = 20_000  # between receives that belong to two micro-batches


def find(evidence: StrategyEvidence, free: Bools) -> tuple[RankPipeline | None, Bools]:
    """Sends and receives, except those of ring attention."""
    ring = {group.name for group in evidence.groups if _RING.search(group.description)}
    stages = evidence.layout.get("pipeline_stages") or []
    kinds = ("send", "recv", "send_recv")
    mine = free & evidence.of_kind(*kinds) & ~evidence.of_groups(ring)
    # Micro-batches per step, if the schedule numbers them.
    trace, host = evidence.trace, evidence.trace.host
    rows = rows_named(trace, host, host.kind == HostKind.ANNOTATION, _MICROBATCH.match)
    matches = [_MICROBATCH.match(trace.strings[code]) for code in set(host.name[rows].tolist())]
    numbers = {int(match[1] or match[2]) for match in matches if match}
    microbatches = len(numbers) or None
    # A kernel that only says SendRecv may be an all-to-all.
    if not (mine & evidence.of_kind("send", "recv")).any() and not (stages or microbatches):
        mine[:] = False
    if not mine.any():
        return None, mine
    indices = tuple(sorted(int(stage["stage"]) for stage in stages if "stage" in stage))
    count = max((int(stage.get("stages") or 0) for stage in stages), default=0) or None
    receiving = mine & evidence.of_kind("recv", "send_recv")
    steps, window = evidence.steps, window_of(evidence.pace)
    compute = intervals.clip(evidence.work.compute, *window)
    others = evidence.spans(~mine & (evidence.step >= 0))
    other = intervals.subtract(intervals.clip(others, *window), compute)
    busy = intervals.length(compute) + intervals.length(other)
    waits = intervals.subtract(intervals.clip(evidence.spans(receiving), *window), compute)
    span = int(evidence.pace.dur_ns.sum())
    words = [f"torch.distributed.pipelining with {counted(count, 'stage')}"] if count else []
    # The share of forward's compute after the step's backward has begun.
    backward, forward = backward_spans(evidence)
    total = late = 0
    starts, ends = evidence.pace.start_ns, evidence.pace.start_ns + evidence.pace.dur_ns
    for step in zip(starts.tolist(), ends.tolist(), strict=True):
        begun, done = intervals.clip(backward, *step)
        in_forward = intervals.clip(forward, *step)
        total += intervals.length(in_forward)
        if len(begun):
            late += intervals.length(intervals.clip(in_forward, int(begun[0]), int(done[-1])))
    return RankPipeline(
        stage_indices=indices,
        stages=count,
        groups=_groups(evidence, mine, count),
        evidence=(*words, "sends and receives inside the step"),
        step_ns=round(span / steps),
        compute_ns=round(intervals.length(compute) / steps),
        other_comm_ns=round(intervals.length(other) / steps),
        bubble_ns=round((span - busy) / steps),
        receive_wait_ns=round(intervals.length_outside(waits, other) / steps),
        microbatches=microbatches,
        receives=_bursts(evidence, receiving) / steps,
        late_forward_share=late / total if total else 0.0,
        annotated=microbatches is not None,
    ), mine


def _groups(evidence: StrategyEvidence, mine: Bools, stages: int | None) -> tuple[Group, ...]:
    """gloo does not name a send's group: take the described group with as many ranks as stages."""
    named = tuple(group for group in evidence.groups_of(mine) if group.name)
    if named:
        return named
    listed = evidence.layout.get("groups") or []
    fits = [described for described in listed if stages and described.get("size") == stages]
    fits.sort(key=lambda described: not _PIPELINE.search(str(described.get("description"))))
    return tuple(_group(described) for described in fits[:1])


def _group(described: dict[str, object]) -> Group:
    ranks, size = described.get("ranks"), described.get("size")
    return Group(
        name=str(described.get("name", "")),
        description=str(described.get("description", "")),
        size=size if isinstance(size, int) else None,
        ranks=tuple(ranks) if isinstance(ranks, list) else (),
    )


def _bursts(evidence: StrategyEvidence, receiving: Bools) -> int:
    """Receives; those of several tensors of one micro-batch count once."""
    times = np.sort((evidence.made_ns if evidence.work.on_host else evidence.start_ns)[receiving])
    if len(times) < 2:
        return len(times)
    between = intervals.covered(evidence.work.compute, times[:-1], times[1:])
    return 1 + int((between > _SOME_COMPUTE_NS).sum())
