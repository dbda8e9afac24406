"""Read what the ranks of a trial kept (losses, peaks of memory, what the script is made of),
and check that the trial reached its end and fits in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.records.quality import Bytes, StepNumber
from stepscope.records.script_facts import ScriptFacts
from stepscope.text.figures import binary_size
from stepscope.text.words import counted
from stepscope.trace.decode import NotJsonError, decode, read_record
from stepscope.trace.files import is_folder, read_whole
from stepscope.trace.run_folder.rank_facts import folder_rank

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
        trial = read_record(folder / TRIAL, RankTrial, max_bytes=_MOST_BYTES)
        number = folder_rank(folder)
        if trial is not None and number is not None:
            ranks[number] = trial
    return ranks


def losses_of(trial: dict[int, RankTrial]) -> dict[int, tuple[Loss, ...]]:
    """Return losses by rank, of ranks that caught any: what `check_parity` takes as one run."""
    return {rank: one.losses for rank, one in trial.items() if one.losses}


# What else a trial must do besides being fast and training the same: reach its end, fit in memory.
#
# A trial is finished if every rank made the steps that were wanted, whatever the exit code then: it
# is ended in the middle of its script. A command that ends earlier by itself is finished if its
# exit code is 0 and every rank made as many steps as the baseline.
#
# Peaks are those of the rank that needs most: on its device as torch counts them, or on the host
# where no rank has a device. A peak over the limit is a reason not to keep a remedy; a peak that
# only grew is reported.

# Peaks of equal runs differ by less. The host's hold what the system keeps for the process.
_SAME = {"device": 0.01, "host": 0.05}
_SIGNALS = 128  # an exit code above it names the signal that ended the command


class PeakChange(msgspec.Struct, frozen=True, kw_only=True):
    """The candidate's peak of memory beside the baseline's; None is not known."""

    where: Literal["device", "host"]
    base_bytes: int | None
    peak_bytes: int | None
    refused: str | None = None  # why the remedy cannot be kept

    @property
    def change(self) -> float | None:
        """Return the change as a share of the baseline's; 0 where equal runs differ as much."""
        if not self.base_bytes or self.peak_bytes is None:
            return None
        share = self.peak_bytes / self.base_bytes - 1
        return share if abs(share) > _SAME[self.where] else 0.0


def compare_peaks(
    baseline: Sequence[TrialRanks], candidate: Sequence[TrialRanks], limit_bytes: int | None = None
) -> PeakChange:
    """Compare the highest peaks of all runs of both sides."""
    where: Literal["device", "host"] = "host"
    if _highest((*baseline, *candidate), "device") is not None:
        where = "device"
    base, peak = _highest(baseline, where), _highest(candidate, where)
    refused = None
    if limit_bytes is not None:
        if peak is None:
            refused = "its peak memory is unknown, but a limit is set"
        elif peak > limit_bytes:
            limit = binary_size(limit_bytes)
            place = "GPU" if where == "device" else "CPU"
            refused = f"it needs {binary_size(peak)} on the {place}, more than the limit of {limit}"
    return PeakChange(where=where, base_bytes=base, peak_bytes=peak, refused=refused)


def _highest(trials: Iterable[TrialRanks], where: str) -> int | None:
    peaks = (getattr(rank.peak, where) for trial in trials for rank in trial.values())
    return max((peak for peak in peaks if peak is not None), default=None)


def why_unfinished(
    steps: Mapping[int, int],
    *,
    ranks: int,
    wanted: int,
    exit_code: int,
    baseline_steps: int | None = None,
) -> str | None:
    """Return None if the trial is finished. `steps` are those of each rank that was seen.

    `baseline_steps` is how many the baseline made, where it ended before `wanted` by itself.
    """
    made = [steps.get(rank, 0) for rank in range(ranks)]
    if all(count >= wanted for count in made):
        return None
    if exit_code > _SIGNALS:
        return f"it was ended by signal {exit_code - _SIGNALS} after {_steps(made)}"
    if exit_code:
        return f"it ended with exit code {exit_code} after {_steps(made)}"
    enough = wanted if baseline_steps is None else min(wanted, baseline_steps)
    late = [rank for rank, count in enumerate(made) if count < enough]
    if not late:
        return None
    who = f"rank {late[0]} made" if ranks > 1 else "the run made"
    return f"{who} {counted(made[late[0]], 'step')} and ended, but {enough} were expected"


def _steps(made: Sequence[int]) -> str:
    return counted(min(made), "step")


# script.json: what a rank on trial says its training script is made of.

SCRIPT = "script.json"


def read_script(rank: Path) -> ScriptFacts | None:
    """Return None if that was not written or cannot be read."""
    try:
        content = decode(read_whole(rank / SCRIPT, _MOST_BYTES), dict[str, Any])
        return ScriptFacts.from_json(content)
    except (UnreadableInputError, NotJsonError, TypeError, KeyError, ValueError):
        return None


if TYPE_CHECKING:
    TrialRanks = Mapping[int, RankTrial]
