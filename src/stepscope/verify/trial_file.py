"""What the ranks of a trial kept beside their steps: losses, to the bit, and peaks of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.records.limits import Bytes, StepNumber  # noqa: TC001  (decoded at run time)
from stepscope.trace.decode import Oddities
from stepscope.trace.rank_facts import folder_rank
from stepscope.trace.regular_files import is_folder
from stepscope.trace.side_files import read_record

if TYPE_CHECKING:
    from pathlib import Path

TRIAL = "trial.json"
_MOST_BYTES = 64 << 20


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """What one backward pass started from."""

    step: StepNumber
    hexadecimal: str  # as float.hex writes it

    @property
    def value(self) -> float:
        return float.fromhex(self.hexadecimal)


class RankPeak(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a process had at most. `device` is None without a CUDA device."""

    device: Bytes | None = None
    host: Bytes | None = None


class RankTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's trial.json."""

    losses: tuple[Loss, ...] = ()
    peak: RankPeak = RankPeak()


def read_trial(run: Path) -> dict[int, RankTrial]:
    """Each rank's trial in a run folder; a rank without a readable file is left out."""
    ranks = {}
    for folder in sorted(run.glob("rank-*")):
        if "." in folder.name or not is_folder(folder):
            continue
        trial = read_record(folder / TRIAL, RankTrial, Oddities(TRIAL), _MOST_BYTES)
        number = folder_rank(folder)
        if trial is not None and number is not None:
            ranks[number] = trial
    return ranks


def losses_of(trial: dict[int, RankTrial]) -> dict[int, tuple[Loss, ...]]:
    """By rank, without ranks that caught none: what `check_parity` takes as one run."""
    return {rank: one.losses for rank, one in trial.items() if one.losses}
