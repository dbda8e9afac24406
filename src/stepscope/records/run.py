"""A run: how it was started, what all its steps show, how it goes on and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from stepscope.records.folders import ProcessIdentity
from stepscope.records.rank_facts import LoaderUse
from stepscope.records.source_lines import Place, StackDifference

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# What all steps of a run show: the mean step, its stalls, when they came, and the wall time.
#
# Field names are the words of the JSON contract (docs/reference/json.md, `run`).

# Why a step took longer than a typical one.
StallCause = Literal[
    "data",  # the data loader had no batch ready
    "evaluation",
    "checkpoint",
    "gc",  # Python's garbage collector
    "compile",  # dynamo compiled, or compiled again
    "allocator",  # the device's allocator ran out, freed its cache and asked again
    "collective",  # this rank waited for another one
    "operating_system",  # no core was free, or pages came from disk
    "logging",  # Python between two steps: logging, printing, .item()
    "unknown",
    # Time without gradients that is no evaluation.
    "collecting",  # experience, in reinforcement learning
    "generating",
    "without_gradients",  # it is not known what for
]
STALL_CAUSES: tuple[StallCause, ...] = get_args(StallCause)

# What a script may do without gradients between two steps; the account has one of them.
WITHOUT_GRADIENTS: tuple[StallCause, ...] = (
    "evaluation",
    "collecting",
    "generating",
    "without_gradients",
)

# Where the wall time of a command went.
ACCOUNT = (
    "start_up",
    "first_steps",
    "training",
    "evaluation",
    "checkpoint",
    "between_epochs",
    "windows",
    "outside",
    "shut_down",
)


CORE_WAIT = "core_wait"  # the training thread is ready to run and no core is free


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The steady steps. mean = typical + the cost of all stalls."""

    steps: int  # steady ones
    mean_ms: float
    low_ms: float  # of the mean
    high_ms: float
    median_ms: float
    typical_ms: float  # the mean without stalls
    p99_ms: float
    longest_ms: float
    variation: float  # of steps that are no stalls: standard deviation over mean, robust


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """All stalls with one cause."""

    cause: StallCause
    steps: int  # steps that stalled for it
    cost_ms: float  # per average step
    share: float  # of the mean step
    typical_ms: float  # what one of them took longer
    longest_ms: float
    period: int | None = None  # they come every so many steps
    numbers: tuple[int, ...] = ()  # of the longest ones
    between_epochs_ms: float = 0.0  # per step as well, but no part of the step: see StepColumns
    # Waits for ranks of other hosts: how far off each may be; None without.
    wait_error_ms: float | None = None
    where: tuple[Place, ...] = ()  # lines that were running in stalled steps, more than in others


class LevelChange(msgspec.Struct, frozen=True, kw_only=True):
    """From this step on a typical step takes another time; it lies between low and high."""

    step: int
    low: int
    high: int
    before_ms: float
    after_ms: float
    # How much more a typical step spends in each phase; CORE_WAIT lies inside these.
    more_ms: dict[str, float] = {}
    where: tuple[Place, ...] = ()  # lines that take longer since then, by sampled stacks

    @property
    def factor(self) -> float:
        return self.after_ms / self.before_ms


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer the last steps are than the first, by a straight line."""

    growth: float  # as a share of the first steps
    low: float
    high: float
    per_step: float  # in the unit of the values
    follows_memory: bool | None = None  # beyond what both owe to time; None: cannot be told


class InputEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Steps vary because their inputs do."""

    explained: float  # share of the steps' variance
    fixed_ms: float
    per_element_ms: float
    fewest: int  # elements of a batch
    most: int
    low_ms: float | None = None  # 95% interval of per_element_ms
    high_ms: float | None = None


class MemoryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are alive at step ends, over the whole run."""

    bytes_per_step: float
    low: float
    high: float
    first_bytes: int
    last_bytes: int
    of: Literal["device", "host"]


class AccountPart(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # one of ACCOUNT, or a part of one
    ms: float
    share: float  # of the wall time
    parts: tuple[AccountPart, ...] = ()  # they add up to this one


class RunAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The command's wall time. The parts add up to it."""

    wall_ms: float
    goodput: float  # steady training over wall time
    parts: tuple[AccountPart, ...]
    notes: tuple[str, ...] = ()  # what could not be told apart


class StepSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Every step for pictures; not in the JSON."""

    number: NDArray[np.int64]
    start_unix_ns: NDArray[np.int64]
    step_ns: NDArray[np.int64]
    cause: NDArray[np.int8]  # index into STALL_CAUSES of a stall's main cause, -1: no stall
    window: NDArray[np.bool_]  # the profiler or the memory capture ran
    warm_up: int  # this many of the first steps
    excess_ns: NDArray[np.int64] | None = None  # what a stall took longer; 0: no stall
    unknown_ns: NDArray[np.float64] | None = None  # of that, what nobody measured


class OwnLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the user's and its share of a typical step, by sampled stacks."""

    place: Place
    share: float
    package: str = ""  # whose code it called then; empty: its own


class OwnPython(msgspec.Struct, frozen=True, kw_only=True):
    """What a typical step does outside models, backward passes and optimizers: the user's own code
    and other libraries. Changes to the model do not reach it."""

    share: float  # of a typical step
    low: float  # 95% interval, from the number of samples
    high: float
    samples: int  # in typical steps
    lines: tuple[OwnLine, ...] = ()  # the costliest first


class NotedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run of short steps: capture noted the phases of some only, so as to cost nothing."""

    steps: int
    noted: int  # of them
    noting_ms: float  # a noted step takes longer by that; step times are without it
    # Of the noted steps: share of the time, with the ends of its 95% interval.
    phases: dict[str, tuple[float, float, float]]


class RankRun(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's steps, from the first to the last."""

    rank: int
    attempt: int = 1  # a job that is restarted into the same folder has several
    steps: int  # all that were seen
    warm_up: int  # of them, at the beginning
    times: StepTimes | None  # None without steady steps
    stalls: tuple[Stall, ...] = ()  # the costliest first
    changes: tuple[LevelChange, ...] = ()
    trend: Trend | None = None
    inputs: InputEffect | None = None
    memory_growth: MemoryGrowth | None = None
    account: RunAccount | None = None
    began_ns: int | None = None  # the command or this attempt, on this host's clock
    ended_ns: int | None = None
    series: StepSeries | None = None
    loader: LoaderUse | None = None  # that feeds the training; None: not captured
    stacks: tuple[StackDifference, ...] = ()  # by cause of stalls; not in the JSON
    own_python: OwnPython | None = None  # None: too few samples
    noted: NotedSteps | msgspec.UnsetType = msgspec.UNSET  # unset: all steps were
    notes: tuple[str, ...] = ()


class RankSpread(msgspec.Struct, frozen=True, kw_only=True):
    """How the steps of all ranks differ, traced or not. Means are over a rank's steady steps."""

    ranks: int
    fewest_steps: int
    most_steps: int
    least_mean_ms: float | None  # None where no rank has steady steps
    median_mean_ms: float | None
    most_mean_ms: float | None
    slowest: tuple[int, ...] = ()  # ranks with the longest mean steps, the longest first


class WholeRun(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of a run. `account` is the mean over the ranks, `spread` of all of them; of a job
    with many ranks, `ranks` has those with a trace only."""

    ranks: tuple[RankRun, ...]
    account: RunAccount | None = None
    spread: RankSpread | None = None  # with several ranks


# When a rank's part of a command began and ended, and what is known of its start-up.


class RunTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Unix times of the command; of one attempt where a job was restarted."""

    began_ns: int
    ended_ns: int
    attempt: int = 1
    imports_ns: int = 0  # from the start of the process to torch's import, inside the first step
    group_ns: int = 0  # inside init_process_group
    first_batch_ns: int | None = None  # when it arrived; None without a data loader
    after_last_ns: dict[str, int] = {}  # evaluation and checkpoints after the last step
    notes: tuple[str, ...] = ()


# What became of a remedy that `run --with` or a trial asked for: in one rank, and in the run.

# unknown: no rank tells, because none trained or rank.json was not written
Outcome = Literal["applied", "refused", "nothing to change", "unknown"]


class AppliedRemedy(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of rank.json's remedies."""

    id: str = ""  # as it was asked for: bf16, bucket-mb=50
    did: list[str] = []  # each thing that it changed
    refused: str | None = None  # why it was not applied

    @property
    def outcome(self) -> Outcome:
        if self.refused:
            return "refused"
        return "applied" if self.did else "nothing to change"


class RunRemedy(msgspec.Struct, frozen=True, kw_only=True):
    """A remedy in all ranks that were read. If it was applied in some of them, it was applied."""

    id: str
    outcome: Outcome
    detail: str = ""  # what it did, or why it was refused
    applied_ranks: int = 0
    ranks: int = 0

    @property
    def words(self) -> str:
        """bf16; tf32 was refused: it needs a CUDA device."""
        if self.outcome == "applied":
            some = self.applied_ranks < self.ranks
            return f"{self.id} in {self.applied_ranks} of {self.ranks} ranks" if some else self.id
        return f"{self.id} {_UNAPPLIED[self.outcome].format(self.detail)}"


_UNAPPLIED: dict[Outcome, str] = {
    "refused": "was refused: {}",
    "nothing to change": "found nothing to change",
    "unknown": "(no rank tells whether it was applied)",
}


class RunOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """How a run was started: its command, the folder it was started in, and its remedies; and how
    it ended, if it failed."""

    command: tuple[str, ...] = ()
    folder: str | None = None  # the working folder
    remedies: tuple[RunRemedy, ...] = ()
    failed: FailedCommand | None = None


def join_ranks(asked: Sequence[str], by_rank: Iterable[Sequence[AppliedRemedy]]) -> list[RunRemedy]:
    """`asked` are the remedies of run.json; `by_rank` those of each rank.json."""
    ranks = [list(remedies) for remedies in by_rank]
    told = (remedy.id for remedies in ranks for remedy in remedies)
    names = dict.fromkeys((*asked, *told))
    return [
        _join(name, [each for remedies in ranks for each in remedies if each.id == name])
        for name in names
    ]


def _join(name: str, by_rank: list[AppliedRemedy]) -> RunRemedy:
    """The outcome that is furthest from what was asked for is told only where none was applied."""
    if not by_rank:
        return RunRemedy(id=name, outcome="unknown")
    ordered = sorted(by_rank, key=lambda remedy: _FIRST.index(remedy.outcome))
    first = ordered[0]
    return RunRemedy(
        id=name,
        outcome=first.outcome,
        detail=first.refused or "; ".join(first.did),
        applied_ranks=sum(remedy.outcome == "applied" for remedy in by_rank),
        ranks=len(by_rank),
    )


_FIRST: tuple[Outcome, ...] = ("applied", "refused", "nothing to change", "unknown")


# A command that failed: its exit code, and the exception that ended one of its processes.


class FailedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`run.failed` in the JSON."""

    exit_code: int
    signal: str | None = None  # the one that ended it, by its exit code
    exception: str | None = None  # its last line: ValueError: bad batch
    place: Place | None = None  # the innermost line of the user's own code
    step: int | None = None  # steps that had ended
    rank: int | None = None  # of the process that raised it; None for one that trains nothing

    @property
    def words(self) -> str:
        """exit code 1 after step 1,200: ValueError: bad batch (train.py:33 in main)."""
        how = f"{self.signal} (exit code {self.exit_code})" if self.signal else ""
        words = how or f"exit code {self.exit_code}"
        if self.step is not None:
            words += f" after step {self.step:,}" if self.step else " before the first step ended"
        if self.exception:
            rank = f"rank {self.rank}: " if self.rank else ""
            words += f": {rank}{self.exception}"
        if self.place is not None:
            inside = f" in {self.place.function}" if self.place.function else ""
            words += f" ({PurePath(self.place.file).name}:{self.place.line}{inside})"
        return words


def failed_json(failed: FailedCommand | None) -> dict[str, Any] | None:
    """Return None for a command that ended well, or whose end is not known."""
    return msgspec.to_builtins(failed) if failed is not None else None


# One `stepscope run` of a job that several of them capture together: hosts/00001.json.


class PassedSignal(msgspec.Struct, frozen=True):
    """A signal that was passed on to the command."""

    signal: str


class HostRun(msgspec.Struct, frozen=True, kw_only=True):
    """What it wrote about itself; `place` is its number in the job, from 0, where that is known."""

    job: str = ""
    meeting: str | None = None
    place: int | None = None
    places: int | None = None
    attempt: int = 0
    host: str = ""
    stepscope: str = ""
    status: str = ""
    exit_code: int | None = None
    started_unix: float | None = None
    ended_unix: float | None = None
    process: ProcessIdentity | None = None
    signals: list[PassedSignal] = []

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"


# A run while it goes on, as `stepscope top` shows it: figures over the steps written so far.
#
# Field names are the words of `top --json` (docs/reference/json.md).

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
