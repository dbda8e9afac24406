"""How a run was started: run.json's command and remedies, and what its ranks say became of them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.records.applied_remedy import AppliedRemedy, RunOrigin, join_ranks
from stepscope.trace.decode import Oddities
from stepscope.trace.failures import find_failure
from stepscope.trace.rank_facts import decode_facts, folder_rank
from stepscope.trace.remote import is_url
from stepscope.trace.side_files import read_record

if TYPE_CHECKING:
    from collections.abc import Iterable

RUN = "run.json"
_MOST_BYTES = 64 << 20  # of run.json, which lists every rank
_MOST_RANKS = 64  # whose rank.json is read: all ranks are asked for the same


class _RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of run.json that was written before the command started."""

    command: list[str] | None = None
    folder: str | None = None
    remedies: list[str] | None = None
    exit_code: int | None = None  # once it has ended


def read_origin(run: Path, ranks: Iterable[Path] = ()) -> RunOrigin | None:
    """`ranks` are the folders of its ranks. None without a run.json and without remedies."""
    start = read_record(run / RUN, _RunStart, Oddities(RUN), _MOST_BYTES)
    remedies = join_ranks(
        (start.remedies if start else None) or (),
        [_told(rank) for rank in islice(ranks, _MOST_RANKS)],
    )
    if start is None and not remedies:
        return None
    start = start or _RunStart()
    return RunOrigin(
        command=tuple(start.command or ()),
        folder=start.folder,
        remedies=tuple(remedies),
        failed=find_failure(run, start.exit_code),
    )


def origin_of_traces(paths: Iterable[str]) -> RunOrigin | None:
    """The origin of the run that these traces belong to; None for bare traces."""
    ranks = [Path(path).parent for path in paths if not is_url(path)]
    ranks = [rank for rank in dict.fromkeys(ranks) if folder_rank(rank) is not None]
    return read_origin(ranks[0].parent, ranks) if ranks else None


def _told(rank: Path) -> list[AppliedRemedy]:
    remedies = decode_facts(rank, Oddities("rank.json")).remedies
    return remedies if isinstance(remedies, list) else []
