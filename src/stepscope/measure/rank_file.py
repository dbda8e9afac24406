"""rank.json: what this rank is, how far it came and what went wrong."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout
from stepscope.measure.kept_json import KeptJson
from stepscope.measure.never_raise import problems
from stepscope.measure.ranks import facts
from stepscope.records.process_identity import this_process

if TYPE_CHECKING:
    from pathlib import Path


class RankFile:
    """Written when the first step ends and when the rank does."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._file = KeptJson(folder / layout.RANK)
        self._rank, self._world_size = rank, world_size

    def write(self, status: str, progress: dict[str, Any], surroundings: dict[str, Any]) -> None:
        """On a full disk the surroundings are left out first, then most problems."""
        short = {
            "schema": layout.SCHEMA,
            "rank": self._rank,
            "world_size": self._world_size,
            "status": status,
            **progress,
            "process": asdict(this_process()),
            "problems": problems(),
        }
        whole = {**short, "argv": sys.argv, **surroundings, **facts()}
        shortest = {**short, "problems": problems()[:3]}
        try:
            self._file.write(whole, short, shortest, last=status != "running")
        except OSError as error:
            layout.note_unwritten(layout.RANK, error)
