"""Steps whose kernels belong to no known operator, as CUDA graphs without their recording."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict.outcome import Refused

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags
    from stepscope.predict.step_context import StepContext

_MOST = 0.5  # of the device's time


def find_unknown(context: StepContext) -> Flags:
    """Tasks of the trace without an operator."""
    unknown: Flags = (context.graph.tasks.row >= 0) & (context.operators.row < 0)
    return unknown


def require_operators(context: StepContext, change: str) -> None:
    """Refuse a change of operators where most of the device's time is not known by operator."""
    dur_ns = context.graph.tasks.dur_ns
    if dur_ns[find_unknown(context)].sum() > _MOST * dur_ns.sum():
        raise Refused(
            f"{change}: the trace does not say which operators launched its kernels. With "
            "CUDA graphs, record an eager step, or the graph's capture, in the same window"
        )
