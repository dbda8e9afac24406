"""All that was read about one rank: its steps as columns, its trace and what lies beside it,
and ranks that recorded no trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.normal import median

if TYPE_CHECKING:
    from stepscope.records.compiled import CapturedGraph, CompilerRecord
    from stepscope.records.hardware import Profile
    from stepscope.records.job import RankFolder, RankPart
    from stepscope.records.memory import CapturedMemory, SavedMemory
    from stepscope.records.quality import Note
    from stepscope.records.rank_facts import HostLoad, HostStepTimes, LoaderUse, OptimizerLine
    from stepscope.records.run import RankRun, RunTimes
    from stepscope.records.source_lines import StackSamples
    from stepscope.records.trace import Trace

Ints = NDArray[np.int64]
StepFlags = NDArray[np.bool_]

# All that was read about one rank: what explaining it and predicting its step both start from.


class MemoryInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What capture wrote about memory, and the limit that the user gave."""

    captured: CapturedMemory | None = None
    saving: SavedMemory | None = None
    # (step, bytes allocated when it ended): of the first steps and the last ones.
    step_bytes: tuple[tuple[int, int], ...] = ()
    limit_bytes: int | None = None
    notes: tuple[Note, ...] = ()  # parts of these files that could not be read


class RankInputs(msgspec.Struct, frozen=True, kw_only=True):
    """A bare trace has the trace alone; a rank of a run folder may have all of them."""

    trace: Trace
    steps: StepColumns | None = None
    times: RunTimes | None = None  # of the command
    measured: MeasuredSteps | None = None  # given by a caller who has no columns of steps
    folder: RankFolder | None = None
    memory: MemoryInputs = MemoryInputs()
    host_steps: tuple[HostStepTimes, ...] = ()  # those in which the host never waited
    optimizer_lines: tuple[OptimizerLine, ...] = ()
    samples: StackSamples | None = None  # stacks outside windows, with their steps
    compiler: CompilerRecord | None = None  # what torch.compile did
    captures: tuple[CapturedGraph, ...] = ()  # CUDA graphs of the script, in order
    calibrations: tuple[Profile, ...] = ()  # of the rank's host and kind, newest first

    @property
    def profile(self) -> Profile | None:
        """The newest calibration of the rank's device. A CPU has no name in a trace."""
        device = self.trace.device_name
        return next((one for one in self.calibrations if device in (None, one.device)), None)

    @property
    def loaders(self) -> tuple[LoaderUse, ...]:
        """The DataLoaders that feed the training, the main one first."""
        data = self.folder.data if self.folder else None
        return data.feeding if data else ()

    @property
    def loader(self) -> LoaderUse | None:
        return next(iter(self.loaders), None)

    @property
    def host_load(self) -> HostLoad | None:
        return self.folder.load if self.folder else None


# Every step that a rank ran, as columns: steps.jsonl and its packed parts.

# Each nanosecond of a step belongs to one of these; they add up to its wall time.
USUAL_PHASES = ("data", "forward", "backward", "optimizer", "other")
RARE_PHASES = ("evaluation", "checkpoint", "gc", "compile", "between_epochs")
ALL_PHASES = (*USUAL_PHASES, *RARE_PHASES)
_HOST_PACE = 0.9  # of the device's time for a step: a host that takes less runs ahead


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """In the order of steps, each once. A column that was not captured is None."""

    number: Ints
    wall_ns: Ints
    end_unix_ns: Ints  # 0 where it was not captured
    phases_ns: dict[str, Ints]  # by phase; a phase that never ran is not in it
    window: StepFlags  # the profiler ran
    memory: StepFlags  # our own work ran in it: the memory step, and those that measure the host
    whole: StepFlags  # its beginning and end were seen
    # Time between two epochs: evaluation, checkpoints and the rest. It lies inside wall_ns and is
    # counted in the phases too, but is no part of the step's own time.
    epoch_gap_ns: Ints | None = None
    device_ns: Ints | None = None  # -1 where it was not measured
    # Of the tensors in the batches that the step trained on; of input_ids alone where a batch has
    # them; 0 where not known.
    elements: Ints | None = None
    allocated_bytes: Ints | None = None  # when the step ended; -1 where not read
    # A line leaves these out when they are under a floor (0.5 ms, one, one): then the column has 0.
    # `counters` in rank.json says whether they were read at all. They count since the last reading,
    # which came with allocated_bytes; every step 1.5 times as long as usual ends with one.
    cpu_wait_ns: Ints | None = None  # the training thread was ready to run and had no core
    major_faults: Ints | None = None  # pages read from disk
    retries: Ints | None = None  # of the device's allocator
    graphs: Ints | None = None  # compiled by dynamo in this step
    # Of short steps only some are noted in full: of the others this time is divided among the
    # phases as in noted steps near them. None where all are noted.
    unnoted_ns: Ints | None = None
    ours_ns: int = 0  # how much longer a step is because it is noted

    def __len__(self) -> int:
        return len(self.number)

    @property
    def plain(self) -> StepFlags:
        """Seen whole, on the device too, with neither the profiler nor the memory capture at
        work."""
        return self.whole & ~self.window & ~self.memory & ~self.unfinished

    @property
    def unfinished(self) -> StepFlags:
        """The last steps, if the device was not through with them when the run ended and the host
        was quicker than it: nobody knows how long they took."""
        rest = np.zeros(len(self), np.bool_)
        if self.device_ns is None or not (self.device_ns >= 0).any():
            return rest
        timed = np.flatnonzero(self.device_ns >= 0)
        last = int(timed[-1]) + 1
        host_ns, device_ns = self.wall_ns[last:], self.device_ns[timed]
        if len(host_ns):
            rest[last:] = host_ns.mean() < _HOST_PACE * median(device_ns)
        return rest

    @property
    def noted(self) -> StepFlags:
        """Whose phases were all noted."""
        if self.unnoted_ns is None:
            return np.ones(len(self), np.bool_)
        return self.unnoted_ns <= 0

    @property
    def step_ns(self) -> Ints:
        """Each step's own time: the device's if it was measured, else the host's; never the time
        between epochs, nor what noting it took."""
        own = self.wall_ns
        if self.device_ns is not None:
            own = np.where(self.device_ns >= 0, self.device_ns, own)
        if self.ours_ns:
            own = np.where(self.noted, np.maximum(own - self.ours_ns, 1), own)
        return own if self.epoch_gap_ns is None else np.maximum(own - self.epoch_gap_ns, 0)


# Steps measured without the profiler, in the same run as a trace.


class MeasuredSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The typical step: steady steps without stalls (explain/whole_run)."""

    steps: int
    steps_ns: tuple[int, ...]  # all steady ones, stalls too
    step_ns: int  # the mean step without stalls: device time if known, else wall time
    wall_ns: int
    device_ns: int | None
    phases_ns: dict[str, int]
    data_ns: int | None = None  # the mean wait for data in a step that is no stall
    host_ns: dict[str, int] = {}  # phases of steps in which the host ran ahead; may be empty


# Ranks that recorded no trace: their steps and collectives count all the same.


class RankWithoutTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One such rank. Its part has no calls and no pace: these come from a trace. Of a job with many
    ranks its run has the account alone."""

    path: str  # of its folder
    part: RankPart
    run: RankRun
    mean_ms: float | None  # of its steady steps; None without any
    rule: str | None = None  # of `--ranks`, by which it was left out; None: a trace was wanted
    notes: tuple[Note, ...] = ()

    @property
    def rank(self) -> int:
        return self.part.rank


class RanksWithoutTrace(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, for the JSON."""

    count: int
    ranks: tuple[tuple[int, int], ...]  # ranges, both ends included
    why: str
