"""Ranks that recorded no trace: their steps and collectives count all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from stepscope.records.job import RankPart
    from stepscope.records.quality import Note
    from stepscope.records.whole_run import RankRun


class RankWithoutTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One such rank. Its part has no calls and no pace: these come from a trace. Of a job with many
    ranks its run has the account alone."""

    path: str  # of its folder
    part: RankPart
    run: RankRun
    mean_ms: float | None  # of its steady steps; None without any
    rule: str | None = None  # of `--ranks`, by which it was left out; None: a trace was wanted
    notes: tuple[Note, ...] = ()

    @property
    def rank(self) -> int:
        return self.part.rank


class RanksWithoutTrace(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, for the JSON."""

    count: int
    ranks: tuple[tuple[int, int], ...]  # ranges, both ends included
    why: str


def number_spans(numbers: list[int]) -> tuple[tuple[int, int], ...]:
    """0, 1, 2, 7 -> (0, 2), (7, 7)."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return tuple(spans)
