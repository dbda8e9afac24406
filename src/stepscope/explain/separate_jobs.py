"""Whether bare traces that are explained together are one job: by what they say, not by being here.

Ranks of one job have different numbers and run at the same time. A copy of a trace, or a cut one,
has the same events; the whole one is explained.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepscope.errors import UsageError
from stepscope.explain.untimed_rank import is_untimed
from stepscope.records.figures import long_duration
from stepscope.records.quality import Note
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.explanation import Explanation, RankExplanation

INSTEAD = "explain each of them alone, or two with `stepscope compare A B`"
_CLOCKS_APART_NS = 60_000_000_000  # hosts' clocks may differ by this much
_SINCE_1970_NS = 10**17  # smaller times count from the start of a machine
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,8})(?!\d)", re.IGNORECASE)
_NAMED = 4


class SeveralJobsError(UsageError):
    """The traces are not one job; each job is explained alone."""

    def __init__(self, jobs: Sequence[Explanation], why: str) -> None:
        self.jobs, self.why = tuple(jobs), why
        traces = counted(sum(len(job.ranks) for job in jobs), "trace")
        super().__init__(f"these {traces} are not one job ({why}): {INSTEAD}")


class Grouped(NamedTuple):
    """The places of the ranks of each job, in their order, without copies."""

    jobs: list[list[int]]
    why: str  # the second is another job than the first
    notes: list[Note]


def group_jobs(ranks: Sequence[RankExplanation]) -> Grouped:
    """Ranks of run folders are one job, whose folders were compared before."""
    if any(map(is_untimed, ranks)):  # a snapshot among traces is refused elsewhere
        return Grouped([[*range(len(ranks))]], "", [])
    copies = _find_copies(ranks)
    jobs: list[_Job] = []
    why = ""
    for place, rank in enumerate(ranks):
        if place in copies:
            continue
        reasons = [job.why_not(rank) for job in jobs]
        if all(reasons):
            why = why or (reasons[0] if reasons else "")
            jobs.append(_Job())
        jobs[reasons.index("") if "" in reasons else -1].add(place, rank)
    return Grouped([job.places for job in jobs], why, _about_copies(ranks, copies))


class _Job:
    """Ranks that may be of one job: other numbers, one world size, the same time."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self._of_folder = False
        self._numbers: set[int] = set()
        self._worlds: set[int] = set()
        self._say_numbers = self._on_calendar = True  # all of them
        self._last_start_ns, self._first_end_ns = 0, 1 << 62

    def add(self, place: int, rank: RankExplanation) -> None:
        self.places.append(place)
        number = _number(rank)
        self._of_folder |= not _is_bare(rank)
        self._numbers |= set() if number is None else {number}
        self._worlds |= {rank.world_size} if rank.world_size else set()
        self._say_numbers &= rank.rank is not None
        self._on_calendar &= rank.timeline.start_ns >= _SINCE_1970_NS
        self._last_start_ns, self._first_end_ns = self._times_with(rank)

    def why_not(self, rank: RankExplanation) -> str:
        """Why this rank is of another job; "" if it may be of this one."""
        if self._of_folder and not _is_bare(rank):
            return ""
        if rank.world_size and self._worlds and rank.world_size not in self._worlds:
            return f"jobs of {min(self._worlds)} and of {counted(rank.world_size, 'rank')}"
        number = _number(rank)
        if number in self._numbers:
            return f"more than one says it is rank {number}"
        said = self._say_numbers and rank.rank is not None
        if said and not (self._on_calendar and rank.timeline.start_ns >= _SINCE_1970_NS):
            return ""
        start_ns, end_ns = self._times_with(rank)
        gap_ns = start_ns - end_ns
        apart = gap_ns > (_CLOCKS_APART_NS if said else 0)
        return f"they were recorded {long_duration(gap_ns)} apart" if apart else ""

    def _times_with(self, rank: RankExplanation) -> tuple[int, int]:
        """The last start and the first end."""
        start_ns = rank.timeline.start_ns
        end_ns = start_ns + rank.timeline.span_ns
        return max(self._last_start_ns, start_ns), min(self._first_end_ns, end_ns)


def rank_in_name(path: str) -> int | None:
    """The number of the rank in the name of the file or its folder."""
    file = Path(path)
    match = _RANK_IN_NAME.search(file.name) or _RANK_IN_NAME.search(file.parent.name)
    return int(match[1]) if match else None


def _is_bare(rank: RankExplanation) -> bool:
    """Whether only its trace says what it belongs to."""
    return not (rank.run or rank.part.member or rank.part.host)


def _number(rank: RankExplanation) -> int | None:
    return rank.rank if rank.rank is not None else rank_in_name(rank.path)


def _find_copies(ranks: Sequence[RankExplanation]) -> dict[int, int]:
    """Of each copy, the place of the trace that has more events, or came first."""
    alike: dict[object, list[int]] = {}
    copies: dict[int, int] = {}
    for place in sorted(range(len(ranks)), key=lambda place: -ranks[place].events):
        rank = ranks[place]
        if not _is_bare(rank) or not rank.timeline.span_ns:
            continue
        facts = (rank.kind, rank.device, rank.world_size, _number(rank))
        wholes = alike.setdefault(facts, [])
        whole = next((other for other in wholes if _is_copy(rank, ranks[other])), None)
        if whole is None:
            wholes.append(place)
        else:
            copies[place] = whole
    return copies


def _is_copy(rank: RankExplanation, whole: RankExplanation) -> bool:
    """Whether it holds events of the other one: it begins or ends to the nanosecond with it, or has
    steps of it."""
    (start, end), (first, last) = (
        (one.timeline.start_ns, one.timeline.start_ns + one.timeline.span_ns)
        for one in (rank, whole)
    )
    if start < first or end > last:
        return False
    steps, all_steps = (
        {(step.start_ns, step.dur_ns) for step in one.steps.steps} for one in (rank, whole)
    )
    return start == first or end == last or bool(steps and steps <= all_steps)


def _about_copies(ranks: Sequence[RankExplanation], copies: dict[int, int]) -> list[Note]:
    if not copies:
        return []
    named = [
        f"{ranks[copy].path} is a {'cut ' if ranks[copy].events < ranks[whole].events else ''}copy "
        f"of {ranks[whole].path}"
        for copy, whole in sorted(copies.items())[:_NAMED]
    ]
    more = f"; and {len(copies) - _NAMED} more" if len(copies) > _NAMED else ""
    traces = counted(len(copies), "trace is", "traces are")
    detail = f"{traces} given twice and counted once: {'; '.join(named)}{more}"
    return [Note(id="same-part-twice", detail=detail, count=len(copies))]
