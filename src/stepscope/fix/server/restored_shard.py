"""What a shard lost that had to be restored from a checkpoint, and in words."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stepscope.records.together import LostUpdates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.fix.server.clocks import ClockTable
    from stepscope.fix.server.shard_state import ShardSnapshot

_SOURCES = {
    "replica": "its replica",
    "checkpoint": "the last checkpoint",
    "start": "its first values, because there was neither replica nor checkpoint",
}


def lost_updates(snapshot: ShardSnapshot, table: ClockTable) -> tuple[LostUpdates, ...]:
    """Counted updates of every member, also of those that have gone, that came after it."""
    lost = []
    for member in (*table.members.values(), *table.gone.values()):
        has = snapshot.counts.get(member.name, snapshot.fenced.get(member.name, member.start))
        if table.consistency.synchronous:
            has = min(has, max(snapshot.closed, member.start))
        if has < member.count:
            lost.append(LostUpdates(member=member.name, first=has, last=member.count - 1))
    return tuple(lost)


def as_of_now(snapshot: ShardSnapshot, table: ClockTable) -> ShardSnapshot:
    """Old values with the present clocks: the next push of each member is the one it now makes."""
    return replace(
        snapshot,
        # The snapshot may have a push that all shards got and the coordinator has yet to count.
        counts={
            name: max(one.count, snapshot.counts.get(name, 0))
            for name, one in table.members.items()
        },
        fenced={name: one.count for name, one in table.gone.items()},
        closed=table.closed,
        held={},
    )


def restored_sentence(shard: int, source: str, lost: Sequence[LostUpdates]) -> str:
    updates = sum(one.last - one.first + 1 for one in lost)
    if not updates:
        return f"shard {shard} was restored from {_SOURCES[source]}: no update was lost"
    return (
        f"shard {shard} was restored from {_SOURCES[source]}: it lost {updates} "
        f"{'update' if updates == 1 else 'updates'} of {len(lost)} workers"
    )
