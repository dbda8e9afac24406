"""Checks a history of a parameter server: what was read and announced, not what anyone counted.

A ledger (see simulated_server.py) has a number for each push. From ledgers alone follow: which
updates a read contains, whether one was applied twice, lost, or only on some shards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from simulated_server import History

from stepscope.fix.server.membership import MemberChange, ShardRestored
from stepscope.records.change_values import Consistency

Update = tuple[int, int, int]  # rank, life, clock


class HistoryChecker:
    """Raises AssertionError with the first promise that the history breaks."""

    def __init__(self, history: History, consistency: Consistency) -> None:
        self.entries = history.entries
        self.consistency = consistency

    def check(self) -> None:
        for place, (kind, what) in enumerate(self.entries):
            if kind == "pull":
                begun, me, ledgers = what
                for shard, ledger in ledgers.items():
                    self._applied_once(ledger)
                    self._read_gap(begun, place, me, shard, ledger)
                    self._own_writes(begun, me, shard, ledger)
            elif kind == "cut":
                self._cut_is_whole(place, *what[1:])
            elif kind == "final":
                for shard, ledger in what.items():
                    self._applied_once(ledger)
                    self._nothing_lost(place, shard, ledger)
                self._nothing_torn(place, what)

    def _applied_once(self, ledger: Any) -> None:
        """Strong: each of a clock's n gradients counts 1/n. Otherwise: an update counts one."""
        if not self.consistency.synchronous:
            assert set(np.unique(ledger)) <= {0.0, 1.0}, "an update was applied twice"
            return
        for clock in range(ledger.shape[2]):
            values = ledger[:, :, clock][ledger[:, :, clock] != 0]
            if len(values):
                assert np.allclose(values, 1 / len(values)), f"clock {clock} is no mean: {values}"

    def _read_gap(self, begun: int, ended: int, me: Update, shard: int, ledger: Any) -> None:
        gap = self.consistency.largest_gap
        if gap is None:
            return
        lost = self._lost(ended, shard)
        for (rank, life), start in self._members_during(begun, ended).items():
            for clock in range(start, me[2] - gap):
                assert ledger[rank, life, clock] or (rank, life, clock) in lost, (
                    f"{me} read shard {shard} without update {(rank, life, clock)}, gap {gap}"
                )

    def _own_writes(self, begun: int, me: Update, shard: int, ledger: Any) -> None:
        lost = self._lost(len(self.entries), shard)
        for kind, what in self.entries[:begun]:
            if kind == "acked" and what[0] == me[0]:
                assert ledger[what] or what in lost, f"{me} does not read its own {what}"

    def _nothing_lost(self, place: int, shard: int, ledger: Any) -> None:
        lost = self._lost(place, shard)
        for kind, what in self.entries[:place]:
            if kind == "acked":
                assert ledger[what] or what in lost, f"shard {shard} lost {what} without a word"
        for update in lost:
            assert not ledger[update], f"shard {shard} has {update}, which it said it lost"

    def _nothing_torn(self, place: int, ledgers: dict[int, Any]) -> None:
        """An update is on all shards or on none, unless it was said."""
        said = {
            (event.worker, event.life) for event in self._events(place, MemberChange) if event.torn
        }
        lost = set().union(*(self._lost(place, shard) for shard in ledgers))
        on_some = np.stack([one != 0 for one in ledgers.values()])
        torn = np.argwhere(on_some.any(0) & ~on_some.all(0))
        for rank, life, clock in torn.tolist():
            assert (rank, life) in said or (rank, life, clock) in lost, (
                f"update {(rank, life, clock)} is only on some shards"
            )

    def _cut_is_whole(self, place: int, counts: dict[str, int], ledgers: list[Any]) -> None:
        """Of every member of the cut, exactly the updates before its count."""
        starts = {
            f"{event.worker}.{event.life}": event.clock
            for event in self._events(place, MemberChange)
            if event.change == "joined"
        }
        for shard, ledger in enumerate(ledgers):
            lost = self._lost(place, shard)
            for member, count in counts.items():
                rank, life = map(int, member.split("."))
                has = {clock for (clock,) in np.argwhere(ledger[rank, life]).tolist()}
                gone = {clock for r, li, clock in lost if (r, li) == (rank, life)}
                expected = set(range(starts[member], count))
                assert has - gone == expected - gone, (shard, member, has, expected)

    # What was announced

    def _events(self, before: int, kind: type) -> list[Any]:
        return [
            what for name, what in self.entries[:before] if name == "event" and type(what) is kind
        ]

    def _lost(self, before: int, shard: int) -> set[Update]:
        lost = set()
        for event in self._events(before, ShardRestored):
            for one in event.lost if event.shard == shard else ():
                rank, life = map(int, one.member.split("."))
                lost |= {(rank, life, clock) for clock in range(one.first, one.last + 1)}
        return lost

    def _members_during(self, begun: int, ended: int) -> dict[tuple[int, int], int]:
        """Those who had joined before and left after, with the clock each started at."""
        members = {}
        for place, (name, what) in enumerate(self.entries[:ended]):
            if name == "event" and type(what) is MemberChange:
                key = (what.worker, what.life)
                if what.change == "joined" and place < begun:
                    members[key] = what.clock
                elif what.change != "joined":
                    members.pop(key, None)
        return members
