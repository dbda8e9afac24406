"""Whether a step runs compiled code, and what one launch of it costs the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict.compiling.compiled_host import in_passes

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

_MARKS = ("triton_", "## Call CompiledFxGraph", "CompiledFunction", "Torch-Compiled Region")


def is_compiled(context: StepContext) -> bool:
    """By the names that the compiler's code leaves in a trace."""
    return any(name.startswith(_MARKS) for name in context.trace.strings)


def launch_ns(context: StepContext) -> float:
    """The host's time per launch of both passes."""
    calls = context.graph.calls
    launching = in_passes(calls)
    total = float((calls.gap_ns + calls.call_ns)[launching].sum())
    return total / max(1, int(launching.sum()))
