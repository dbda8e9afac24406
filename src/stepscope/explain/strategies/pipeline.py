"""Pipelines: a stage's bubble is the step less its compute, whatever it waits in.

An annotation around a micro-batch contains the wait for its input, so annotations only say how many
micro-batches there are. Communication of other strategies is counted apart.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain import intervals
from stepscope.explain.strategies.evidence import backward_spans
from stepscope.explain.work import rows_named
from stepscope.records.job import Group
from stepscope.records.strategies import RankPipeline
from stepscope.records.trace import HostKind
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.explain.intervals import Set
    from stepscope.explain.strategies.evidence import Bools, StrategyEvidence

_MICROBATCH = re.compile(r"^(?:Forward|Backward) (\d{1,9})$|^PP:\d+[A-Z_]+?(\d{1,9})$")
_RING = re.compile(r"(?:^|[_\W])(?:cp|context|ring)(?:$|[_\W])", re.IGNORECASE)
_SOME_COMPUTE_NS = 20_000  # between receives that belong to two micro-batches


def find(evidence: StrategyEvidence, free: Bools) -> tuple[RankPipeline | None, Bools]:
    """Sends and receives, but not those of a ring of attention."""
    ring = {group.name for group in evidence.groups if _RING.search(group.description)}
    stages = evidence.layout.get("pipeline_stages") or []
    kinds = ("send", "recv", "send_recv")
    mine = free & evidence.of_kind(*kinds) & ~evidence.of_groups(ring)
    microbatches = _annotated(evidence)
    # A kernel that only says SendRecv may be an all-to-all.
    if not (mine & evidence.of_kind("send", "recv")).any() and not (stages or microbatches):
        mine[:] = False
    if not mine.any():
        return None, mine
    indices = tuple(sorted(int(each["stage"]) for each in stages if "stage" in each))
    count = max((int(each.get("stages") or 0) for each in stages), default=0) or None
    receiving = mine & evidence.of_kind("recv", "send_recv")
    steps = max(1, len(evidence.pace))
    window = evidence.pace.start_ns[0], evidence.pace.start_ns[-1] + evidence.pace.dur_ns[-1]

    def within(of: Set) -> Set:
        return intervals.clip(of, int(window[0]), int(window[1]))

    compute = within(evidence.work.compute)
    others = _spans(evidence, ~mine & (evidence.step >= 0))
    other = intervals.subtract(within(others), compute)
    busy = intervals.length(compute) + intervals.length(other)
    waits = intervals.subtract(within(_spans(evidence, receiving)), compute)
    span = int(evidence.pace.dur_ns.sum())
    told = [f"torch.distributed.pipelining with {counted(count, 'stage')}"] if count else []
    return RankPipeline(
        stage_indices=indices,
        stages=count,
        groups=_groups(evidence, mine, count),
        evidence=(*told, "sends and receives inside the step"),
        step_ns=round(span / steps),
        compute_ns=round(intervals.length(compute) / steps),
        other_comm_ns=round(intervals.length(other) / steps),
        bubble_ns=round((span - busy) / steps),
        receive_wait_ns=round(intervals.length_outside(waits, other) / steps),
        microbatches=microbatches,
        receives=_bursts(evidence, receiving) / steps,
        late_forward_share=_late_forward(evidence),
        annotated=microbatches is not None,
    ), mine


def _spans(evidence: StrategyEvidence, chosen: Bools) -> Set:
    return intervals.union(evidence.start_ns[chosen], evidence.end_ns[chosen])


def _annotated(evidence: StrategyEvidence) -> int | None:
    """Micro-batches a step, where the schedule numbers them."""
    trace, host = evidence.trace, evidence.trace.host
    rows = rows_named(trace, host, host.kind == HostKind.ANNOTATION, _MICROBATCH.match)
    found = [_MICROBATCH.match(trace.strings[code]) for code in set(host.name[rows].tolist())]
    numbers = {int(match[1] or match[2]) for match in found if match}
    return len(numbers) or None


def _groups(evidence: StrategyEvidence, mine: Bools, stages: int | None) -> tuple[Group, ...]:
    """gloo does not say which group a send belongs to: a described one with as many ranks does."""
    named = tuple(group for group in evidence.groups_of(mine) if group.name)
    if named:
        return named
    listed = evidence.layout.get("groups") or []
    fits = [each for each in listed if stages and each.get("size") == stages]
    fits.sort(key=lambda each: not re.search(r"pp|pipe|stage", str(each.get("description")), re.I))
    return tuple(_group(each) for each in fits[:1])


def _group(each: dict[str, object]) -> Group:
    ranks = each.get("ranks")
    size = each.get("size")
    return Group(
        name=str(each.get("name", "")),
        description=str(each.get("description", "")),
        size=size if isinstance(size, int) else None,
        ranks=tuple(ranks) if isinstance(ranks, list) else (),
    )


def _bursts(evidence: StrategyEvidence, receiving: Bools) -> int:
    """Receives, where those of several tensors of one micro-batch count once."""
    made = np.sort((evidence.made_ns if evidence.work.on_host else evidence.start_ns)[receiving])
    if len(made) < 2:
        return len(made)
    between = intervals.covered(evidence.work.compute, made[:-1], made[1:])
    return 1 + int((between > _SOME_COMPUTE_NS).sum())


def _late_forward(evidence: StrategyEvidence) -> float:
    """How much of forward's compute runs after the step's backward has begun."""
    backward, forward = backward_spans(evidence)
    total = late = 0
    for start, dur in zip(
        evidence.pace.start_ns.tolist(), evidence.pace.dur_ns.tolist(), strict=True
    ):
        mine = intervals.clip(backward, start, start + dur)
        own = intervals.clip(forward, start, start + dur)
        total += intervals.length(own)
        if len(mine[0]):
            late += intervals.length(intervals.clip(own, int(mine[0][0]), int(mine[1][-1])))
    return late / total if total else 0.0
