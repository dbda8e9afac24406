"""The rank of each file: by its trace, else by its name, else by its place in the list."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.separate_jobs import rank_in_name
from stepscope.records.quality import Note
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.explanation import RankExplanation
    from stepscope.records.ranks_without_trace import RankWithoutTrace


def number_ranks(
    ranks: list[RankExplanation], untraced: Sequence[RankWithoutTrace] = ()
) -> tuple[list[RankExplanation], list[Note]]:
    """Every rank with a number, and notes about numbers that do not fit together. `untraced` are
    here as well, and have their numbers."""
    numbered = [
        rank if rank.rank is not None else replace(rank, rank=_number_in_name(rank.path, place))
        for place, rank in enumerate(ranks)
    ]
    if _are_processes(numbered):
        places = sorted(range(len(ranks)), key=lambda i: _folder_order(ranks[i].path))
        for number, place in enumerate(places):
            name = f"process {number + 1}"
            numbered[place] = replace(numbered[place], rank=number, name=name)
    notes = [*_notes_on_numbers(numbered), *_notes_on_world_sizes(numbered, untraced)]
    return numbered, notes


def _number_in_name(path: str, place: int) -> int:
    number = rank_in_name(path)
    return place if number is None else number


def _notes_on_numbers(ranks: list[RankExplanation]) -> list[Note]:
    numbers = Counter(rank.rank for rank in ranks if rank.rank is not None)
    twice = sorted(number for number, count in numbers.items() if count > 1)
    if not twice:
        return []
    which = ", ".join(map(str, twice[:8]))
    return [Note(id="duplicate-ranks", detail=f"more than one file says it is rank {which}")]


def _notes_on_world_sizes(
    ranks: list[RankExplanation], untraced: Sequence[RankWithoutTrace]
) -> list[Note]:
    worlds = {rank.world_size for rank in ranks if rank.world_size}
    worlds |= {rank.part.world_size for rank in untraced if rank.part.world_size}
    here = len(ranks) + len(untraced)
    if len(worlds) > 1:
        detail = f"files of jobs with different world sizes: {sorted(worlds)}"
        return [Note(id="mixed-worlds", detail=detail)]
    if worlds and 1 < here < max(worlds):
        detail = f"{here:,} of {counted(max(worlds), 'rank')} are here"
        return [Note(id="missing-ranks", detail=detail)]
    return []


def _folder_order(path: str) -> tuple[int, str]:
    """rank-00000, rank-00000.2, ..., rank-00000.10: the order in which the processes started."""
    name = Path(path).parent.name
    return len(name), name


def _are_processes(ranks: list[RankExplanation]) -> bool:
    """Whether these ran at the same time but not as one job, so that each says it is rank 0."""
    members = [rank.part.member for rank in ranks]
    processes = {(rank.part.host, m.pid) for rank, m in zip(ranks, members, strict=True) if m}
    alone = all(member is not None and member.world_size == 1 for member in members)
    return alone and len(ranks) > 1 and len(processes) == len(ranks)
