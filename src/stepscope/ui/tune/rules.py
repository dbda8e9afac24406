"""What rules a trial out, however fast it is: other numbers than allowed, or too much memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.fix.declaration import Effect
from stepscope.records.figures import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.fix.chosen import ChosenFix
    from stepscope.ui.tune.trial_run import TrialRun


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTrial:
    """What the losses and the memory of a trial show."""

    parity: str
    detail: str
    peak_bytes: int | None
    why_out: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRules:
    """What the user allows."""

    allow: Effect = Effect.ROUNDING
    memory_limit: int | None = None  # bytes of one rank

    def look(
        self, bases: Sequence[TrialRun], trial: TrialRun, members: Sequence[ChosenFix]
    ) -> CheckedTrial:
        """`bases` are runs of the command as it is; `members` are the remedies applied."""
        peak = peak_bytes(trial)
        parity, detail = "bit-identical", ""
        if bases and trial.losses != bases[0].losses:
            parity = "rounding"
        why = None
        if self.memory_limit is not None and peak is not None and peak > self.memory_limit:
            why = f"it needs {size(peak)}, more than --memory-limit {size(self.memory_limit)}"
        return CheckedTrial(parity=parity, detail=detail, peak_bytes=peak, why_out=why)


def peak_bytes(trial: TrialRun) -> int | None:
    """Of the device where there is one, else of the host."""
    return trial.device_bytes if trial.device_bytes is not None else trial.host_bytes


def control_words(bases: Sequence[TrialRun]) -> str:
    """What runs of the command as it is do to each other."""
    if len(bases) < 2 or not bases[0].losses:
        return ""
    same = all(base.losses == bases[0].losses for base in bases)
    return "its losses repeat to the bit" if same else "its losses differ from run to run"
