"""Lines of the user's code: places, stacks sampled in steps that stall, and what each line
costs in a step.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Place(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    line: int
    function: str = ""

    @property
    def short(self) -> str:
        """`train.py:12`"""
        return f"{PurePath(self.file).name}:{self.line}"

    @property
    def words(self) -> str:
        """`train (train.py:12)`; the line alone for a script's own level."""
        if self.function in ("", "<module>"):
            return self.short
        return f"{self.function} ({self.short})"


# Sampled Python stacks of the training thread, and how they differ in steps that stall.


class StackSamples(msgspec.Struct, frozen=True, kw_only=True):
    """One row per sample, in the order of time."""

    stacks: tuple[tuple[Place, ...], ...]  # each once, its outermost frame first
    number: NDArray[np.int64]  # of the step that ran
    stack: NDArray[np.int64]  # index into stacks
    environments: tuple[str, ...] = ()  # libraries of environments that the script has loaded


class StackShare(msgspec.Struct, frozen=True, kw_only=True):
    """One stack: its share of the samples in stalled steps, and of those in typical ones."""

    frames: tuple[Place, ...]  # the outermost first
    stalled: float
    typical: float


class StackDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks in steps that stalled for one cause, against those in typical steps."""

    cause: str  # one of STALL_CAUSES
    stalled_steps: int
    typical_steps: int
    stalled_samples: int
    typical_samples: int
    stacks: tuple[StackShare, ...]  # those that differ most come first
    stalled_ms: float = 0.0  # the mean of the stalled steps
    typical_ms: float = 0.0


class LineDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer one line runs in a stalled step than in a typical one."""

    place: Place
    more_ms: float
    low_ms: float  # 95% interval, from the number of samples
    high_ms: float


# What each line of the user's code costs in a training step: measured, or estimated.

CostKind = Literal["measured", "estimated"]


class LineOperator(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one operator with the same shapes, made by one line."""

    name: str
    calls: float  # a step
    ms: float  # a step
    shapes: str | None = None  # as the profiler writes them, one list per argument


class LineKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that a line's operators ran on the accelerator."""

    name: str
    ms: float  # a step


class LineCost(msgspec.Struct, frozen=True, kw_only=True):
    """One line's own time: what a function that it calls does in the user's code is not in it.

    forward + backward + optimizer + other = total. Backward counts for the line whose forward it
    undoes.
    """

    file: str  # absolute
    line: int
    function: str
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    optimizer_ms: float = 0.0
    other_ms: float = 0.0  # Python, data, waiting
    share: float = 0.0  # of the step
    kept_bytes: int | None = None  # for backward; None: not captured
    calls: float | None = None  # how often the line runs in a step
    operators: tuple[LineOperator, ...] = ()  # longest first
    kernels: tuple[LineKernel, ...] = ()  # longest first

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms + self.optimizer_ms + self.other_ms

    @property
    def place(self) -> tuple[str, int]:
        return self.file, self.line


class LineCosts(msgspec.Struct, frozen=True, kw_only=True):
    """All lines of a step, costliest first. Their totals and `other_ms` add up to the step."""

    lines: tuple[LineCost, ...]
    step_ms: float
    other_ms: float = 0.0  # of the step, in no line of the user's code
    verdict: str = ""
    peak_bytes: int | None = None
    device: str = ""
    kind: CostKind = "measured"
    run: str | None = None  # the folder that was measured
    batch: int | None = None  # the first dimension of the inputs, if it is known
    batches_per_step: int = 1  # several where gradients accumulate
    texts: dict[str, str] = {}  # the files' texts as they were when measured
    notes: tuple[str, ...] = ()  # what is missing, and why

    def at(self, file: str, line: int) -> LineCost | None:
        """The cost of a line, if it has any."""
        return next((cost for cost in self.lines if cost.place == (file, line)), None)


class FollowedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A measured line and where its text is now."""

    cost: LineCost
    state: Literal["current", "moved", "stale", "gone"]
    line: int | None  # now; None once it is gone


class FollowedLines(msgspec.Struct, frozen=True, kw_only=True):
    """The measured lines of one file in today's text."""

    file: str
    lines: tuple[FollowedLine, ...]

    @property
    def is_changed(self) -> bool:
        """Whether any measured line was edited or removed."""
        return any(line.state in ("stale", "gone") for line in self.lines)


class BatchPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The number in the source that sets the batch size; columns count characters from 0."""

    line: int  # from 1
    column: int
    end_column: int
    value: int
    spelling: str  # what it is, such as batch_size= or the default of --batch-size
    also: tuple[tuple[int, int, int], ...] = ()  # line, column, end: the same number, said again


class BatchElsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """The number that sets the batch size, in another file than the script."""

    file: str
    line: int  # from 1
    name: str  # as it is called there, such as batch_size
    value: int


class BatchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The step at one batch size, as predicted."""

    batch: int
    step_ms: float
    low_ms: float
    high_ms: float
    samples_per_second: float
    peak_bytes: int | None = None
    peak_low_bytes: int | None = None
    peak_high_bytes: int | None = None
