"""What explaining a rank and trying changes on its step both start from."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from stepscope.errors import NotCapturedError
from stepscope.explain.budget import step_time
from stepscope.explain.flops import count_costs
from stepscope.explain.memory.model import read_calls
from stepscope.explain.replay.overhead import correct, find_slowness
from stepscope.explain.replay.typical import typical_step
from stepscope.explain.steps import find_steps
from stepscope.explain.timeline import divide
from stepscope.explain.work import find_work

if TYPE_CHECKING:
    from stepscope.explain.flops import Costs
    from stepscope.explain.memory.model import StepCalls
    from stepscope.explain.replay.overhead import Corrected
    from stepscope.explain.replay.typical import Typical
    from stepscope.explain.work import Work
    from stepscope.records.explanation import Steps, Timeline
    from stepscope.records.trace import Trace


class RankAnalysis:
    """Of one trace. Each part is found when it is first asked for, and then once only."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def work(self) -> Work:
        return find_work(self.trace)

    @cached_property
    def steps(self) -> Steps:
        return find_steps(self.trace, self.work)

    @cached_property
    def timeline(self) -> Timeline:
        """Of the whole trace."""
        return divide(self.work)

    @cached_property
    def profiled_ms(self) -> float | None:
        """The step as it was recorded."""
        return step_time(self.steps, self.timeline).profiled

    @cached_property
    def costs(self) -> Costs:
        return count_costs(self.trace, self.work, self.steps)

    @cached_property
    def calls(self) -> StepCalls | None:
        """Operators of a step's forward that tell the batch and the model."""
        return read_calls(self.trace, self.steps)

    @cached_property
    def slowness(self) -> float | None:
        """How slow recording made the host; None where the trace does not tell."""
        return find_slowness(self.trace)

    @cached_property
    def typical(self) -> Typical:
        """Raises NotCapturedError for a trace that holds no work. Its calls' operators are not
        told: `replay.build.describe` adds them."""
        return typical_step(self.trace, self.work, self.steps, described=False)

    @cached_property
    def corrected(self) -> Corrected | None:
        """The typical step freed of the profiler's cost by the calibrated constants. None where the
        trace shows no steady steps, where nothing tells how slow recording made them, and where it
        comes out no shorter than it was recorded."""
        if not self.steps.cycles_ns or self.slowness is None:
            return None
        try:
            found = correct(self.typical.graph, self.trace, slowness=self.slowness)
        except NotCapturedError:
            return None
        return found if 0 < found.step_ns < 1e6 * (self.profiled_ms or 0.0) else None
