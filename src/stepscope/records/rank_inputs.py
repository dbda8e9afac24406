"""All that was read about one rank: what explaining it and predicting its step both start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from stepscope.records.compiled import CapturedGraph, CompilerRecord
    from stepscope.records.host_load import HostLoad
    from stepscope.records.host_steps import HostStepTimes
    from stepscope.records.job import RankFolder
    from stepscope.records.loader_use import LoaderUse
    from stepscope.records.measured_steps import MeasuredSteps
    from stepscope.records.memory import CapturedMemory
    from stepscope.records.optimizer_line import OptimizerLine
    from stepscope.records.profile import Profile
    from stepscope.records.quality import Note
    from stepscope.records.run_times import RunTimes
    from stepscope.records.saved_memory import SavedMemory
    from stepscope.records.stack_samples import StackSamples
    from stepscope.records.step_columns import StepColumns
    from stepscope.records.trace import Trace


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
    def loader(self) -> LoaderUse | None:
        """The DataLoader that feeds the training."""
        data = self.folder.data if self.folder else None
        return data.feeding if data else None

    @property
    def host_load(self) -> HostLoad | None:
        return self.folder.load if self.folder else None
