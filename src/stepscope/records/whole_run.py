"""What all steps of a run show: the mean step, its stalls, when they came, and the wall time.

Field names are the words of the JSON contract (docs/reference/json.md, `run`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from stepscope.records.loader_use import LoaderUse  # noqa: TC001  (decoded)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stepscope.records.place import Place
    from stepscope.records.stack_samples import StackDifference

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
