"""A run while it goes on, as `stepscope top` shows it: figures over the steps written so far.

Field names are the words of `top --json` (docs/reference/json.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from stepscope.records.whole_run import RankRun

LiveStatus = Literal[
    "starting up",  # no step has ended
    "training",
    "shutting down",  # every process has ended, the command has not
    "seems to hang",  # no step for far longer than a step takes
    "finished",
    "failed",  # the command ended with an exit code other than 0
    "killed",  # its process is gone, and nobody closed the run
    "unknown",  # on another machine, and silent
]
ENDED = frozenset({"finished", "failed", "killed"})


class LiveRank(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the job. `run` rests on `kept` of the `run.steps` steps."""

    run: RankRun
    kept: int
    explained_steps: int = 0  # how many there were when `run` was made
    last_step: int | None = None  # its number
    quiet_s: float | None = None  # since the last step ended, or since the run did; None: no step
    steps_per_s: float | None = None  # whole steps over the time that they took
    recent_steps_per_s: float | None = None  # the same for the last ten seconds of steps
    phases_ms: dict[str, float] = {}  # of a typical step, on the host
    goodput: float | None = None  # steady training over wall time
    memory_bytes: int | None = None  # alive when the last step that was asked ended
    on_device: bool = True  # else that is all of the process's memory
    windows: int = 0  # of the profiler, so far
    seconds: float = 0.0  # from the beginning of its first step to the end of its last


class LiveRun(msgspec.Struct, frozen=True, kw_only=True):
    """All processes of a run. A restarted job has earlier attempts, in the order of time."""

    folder: str
    status: LiveStatus
    detail: str  # a sentence about the status
    seconds: float  # wall time of the command, so far
    command: tuple[str, ...] = ()
    exit_code: int | None = None
    ranks: tuple[LiveRank, ...] = ()  # of the last attempt, in order of rank
    earlier: tuple[LiveRank, ...] = ()  # of attempts that have ended
    world_size: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def by_mean(self) -> tuple[LiveRank, ...]:
        """The slowest first; ranks without steady steps come last."""
        return tuple(sorted(self.ranks, key=lambda rank: -_mean_ms(rank)))

    @property
    def spread(self) -> float | None:
        """The slowest rank's mean step over the fastest rank's; None for fewer than two ranks."""
        means = [_mean_ms(rank) for rank in self.ranks if _mean_ms(rank) > 0]
        return max(means) / min(means) if len(means) > 1 else None


def _mean_ms(rank: LiveRank) -> float:
    return rank.run.times.mean_ms if rank.run.times is not None else 0.0


class FindingNow(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of the last explained window."""

    id: str
    summary: str
    severity: str = ""


class VerdictNow(msgspec.Struct, frozen=True, kw_only=True):
    """What the windows of a run that goes on say, or why they say nothing (`failed`)."""

    verdict: str
    findings: tuple[FindingNow, ...] = ()
    mfu: float | None = None  # of the rank that uses its device least
    peak_bytes: int | None = None  # of the rank that needs most
    batch: int | None = None  # samples of one rank's step
    failed: bool = False
