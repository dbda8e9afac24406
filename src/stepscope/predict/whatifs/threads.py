"""threads=N: a CPU step with so many threads; threads=fit: with one for each core that is free.

What one thread would need is taken from the quickest calls of each operator, from their work at one
core's rates, and from the processor time that the process really used: the least of the three. Each
of them is too long where threads wait for each other. Long operators are then shared among the
threads, short ones are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.machine_load import (
    disturbed,
    free_threads,
    looked,
    lost_to_others,
    threads_take_part,
)
from stepscope.explain.replay.graph import CallKind
from stepscope.explain.threading_gain import speedup
from stepscope.predict.outcome import Outcome, Refused, WrongValue, changed

if TYPE_CHECKING:
    from stepscope.explain.cpu_use import CpuUse
    from stepscope.predict.step_context import StepContext
    from stepscope.records.host_load import HostLoad

HELP = "so many threads of a CPU step (fit: one for each free core)"
FIT = "fit"
_MOST = 1 << 12
# Of the logarithm of the step: scaling alone, and where threads waited for cores.
_DOUBT, _DOUBT_DISTURBED = 0.15, 0.45


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses where the run does not tell its threads, or the cores for so many are not free."""
    use, load = _known(context)
    count = _count(value, load)
    if count == load.threads:
        raise Refused(f"threads={value}: the step runs with {_words(count)} already")
    free = free_threads(load)
    if count > max(free, load.threads):
        raise Refused(f"threads={value}: cores for {_words(free)} only are free for each rank")
    _, counters = looked(use)
    if counters is not None and count < load.threads and not threads_take_part(load, counters):
        raise Refused(f"threads={value}: only one thread computes in this step as it is")
    waited = disturbed(use)
    calls = context.graph.calls
    plain = calls.kind == CallKind.PLAIN
    now_ns = float(calls.call_ns[plain].sum())
    if now_ns <= 0:
        raise Refused(f"threads={value}: the step has no operators to share")
    crowd = _crowding(use) if waited else 1.0
    then_ns = _operators_ns(context, use, load, count, waited=waited) * crowd
    factor = min(1.0, then_ns / now_ns) if waited else then_ns / now_ns
    new = replace(calls, call_ns=np.where(plain, calls.call_ns * factor, calls.call_ns))
    return Outcome(
        context=changed(context, replace(context.graph, calls=new)),
        assumptions=tuple(_assumed(load, count, crowd, waited=waited)),
        spread=0.0,
        doubt=_DOUBT_DISTURBED if waited else _DOUBT,
    )


def _known(context: StepContext) -> tuple[CpuUse, HostLoad]:
    if not context.on_host or context.cpu is None:
        raise Refused("threads: the step does not compute on the CPU")
    if context.cpu.load is None:
        raise Refused(
            "threads: nothing tells how many threads and cores there were (stepscope run does)"
        )
    return context.cpu, context.cpu.load


def _count(value: str, load: HostLoad) -> int:
    if value == FIT:
        return free_threads(load)
    try:
        count = int(value)
    except ValueError:
        count = 0
    if not 1 <= count <= _MOST:
        raise WrongValue(f"threads={value}: give their number, such as 4, or fit")
    return count


def _operators_ns(
    context: StepContext, use: CpuUse, load: HostLoad, count: int, *, waited: bool
) -> float:
    """All operators of a step with so many threads that nothing disturbs."""
    calls = context.graph.calls
    if not waited:
        now_ns = float(calls.call_ns[calls.kind == CallKind.PLAIN].sum())
        shared = use.long_share
        return now_ns * (1 - shared + shared / speedup(load.threads, count))
    modelled = use.alone_short_ns + use.alone_long_ns / speedup(1, count)
    _, counters = looked(use)
    if counters is None or counters.used_cores is None or count > load.threads:
        return modelled
    # Spinning threads use processor time too: one thread needs at most that much.
    used_ns = counters.used_cores * counters.wall_ns / counters.steps
    return min(modelled, used_ns / speedup(1, count))


def _crowding(use: CpuUse) -> float:
    """Other processes stay: a thread still waits for a core at times."""
    load, counters = looked(use)
    if load is None or counters is None or not load.room:
        return 1.0
    return 1.0 + min(1.0, lost_to_others(counters) / load.room)


def _assumed(load: HostLoad, count: int, crowd: float, *, waited: bool) -> list[str]:
    lines = [f"{_words(count)} instead of {load.threads}"]
    if waited:
        lines.append(
            "operators at the pace of their quickest calls, or of one core's arithmetic: threads "
            "that wait for each other hide how long the work is, so the interval is wide"
        )
    if crowd > 1:
        lines.append(f"other processes stay and make it {crowd:.1f} times as long")
    if not waited:
        lines.append("operators of 0.2 ms and more gain with the power 0.8 of the threads")
    return lines


def _words(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
