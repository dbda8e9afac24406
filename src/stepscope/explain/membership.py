"""How one process takes part in its job: what it trains, and how much it exchanges.

Only a run folder shows that. A bare trace without collectives may simply not have recorded them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.explain.work import COMM_SPAN
from stepscope.records.job import Membership

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.job import CollectiveCalls, RankFolder, RankSteps
    from stepscope.records.trace import Trace

# Of the trained bytes. Summing a loss or norms is no exchange of gradients.
LEAST_SHARE = 0.01


def find_membership(
    folder: RankFolder | None, trace: Trace, calls: CollectiveCalls, pace: RankSteps
) -> Membership | None:
    """None for a bare trace, and for a capture without communication."""
    if folder is None or not folder.layout:
        return None
    layout = folder.layout
    trained = layout.get("trained") or {}
    tensors, shared = trained.get("tensors"), trained.get("shared_tensors")
    return Membership(
        pid=folder.pid,
        world_size=folder.world_size or 1,
        steps=folder.steps,
        groups=sum(int(group.get("size") or 0) > 1 for group in layout.get("groups") or ()),
        joined=any(
            layout.get(name)
            for name in ("ddp", "placements", "fsdp_modules", "pipeline_stages", "rpc", "libraries")
        ),
        trained_bytes=trained.get("size_bytes"),
        shared=None if not tensors or shared is None else shared == tensors,
        exchanged_bytes=_exchanged_bytes(folder.comms, trace, calls, pace),
        calls_before=sum((layout.get("flight_recorder") or {}).values()),
    )


def exchanges_gradients(member: Membership) -> bool | None:
    """Whether the process sends its gradients to others; None where that is not known."""
    if member.joined:
        return True
    if not member.exchanged_bytes:
        return None if member.exchanged_bytes is None else False
    if not member.trained_bytes:
        return None
    return member.exchanged_bytes >= LEAST_SHARE * member.trained_bytes


def train_apart(members: Sequence[Membership | None]) -> bool:
    """Whether several processes are known to train, and none of them sends its gradients."""
    return len(members) > 1 and all(
        member is not None and member.steps and exchanges_gradients(member) is False
        for member in members
    )


def _exchanged_bytes(
    lines: Sequence[dict[str, Any]], trace: Trace, calls: CollectiveCalls, pace: RankSteps
) -> int | None:
    """Per step, by the trace or the flight recorder, whichever saw more: the trace lacks gloo's
    calls on device tensors, the recorder lacks sends and receives."""
    recorded = [line.get("size_bytes") for line in lines]
    if (calls.size_bytes < 0).any() or None in recorded:
        return None
    if not len(calls) and not lines and any(map(COMM_SPAN.search, trace.strings)):
        return None  # there are calls of unknown size
    steps = len({line.get("step") for line in lines})
    by_recorder = sum(int(size or 0) for size in recorded) // max(1, steps)
    return max(int(calls.size_bytes.sum()) // max(1, len(pace)), by_recorder)
