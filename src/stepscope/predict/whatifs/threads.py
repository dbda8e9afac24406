"""threads=N: a CPU step with N threads; threads=fit: with one thread per free core.

What one thread would need is the smallest of three times: by the fastest calls of each operator, by
their work at one core's rates, and by the processor time that the process really used. Each of them
is too long if threads wait for each other. Long operators are then shared among the threads, short
ones are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.cpu_use import (
    CpuUse,
    disturbed,
    free_threads,
    looked,
    lost_to_others,
    speedup,
    threads_take_part,
)
from stepscope.predict.declaration import (
    NothingToChange,
    Outcome,
    Refused,
    WrongValue,
    changed,
    parse_whole,
)
from stepscope.step.graph import CallKind
from stepscope.text.figures import factor as factor_text
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext
    from stepscope.records.rank_facts import HostLoad

_FIT = "fit"
_MAX_THREADS = 1 << 12
# Of the logarithm of the step: for scaling alone, and if threads waited for cores.
_DOUBT, _DOUBT_DISTURBED = 0.15, 0.45


def predict(context: StepContext, value: str) -> Outcome:
    """Refuses a run that does not say its threads, and more threads than there are free cores."""
    use, load = _known_use(context)
    count = _count_threads(value, load)
    if count == load.threads:
        raise NothingToChange(
            f"threads={value}: the step runs with {counted(count, 'thread')} already"
        )
    free = free_threads(load)
    if count > max(free, load.threads):
        raise NothingToChange(
            f"threads={value}: each rank has free cores for {counted(free, 'thread')} only"
        )
    _, counters = looked(use)
    if counters is not None and count < load.threads and not threads_take_part(load, counters):
        raise NothingToChange(f"threads={value}: only one thread computes in this step")
    waited = disturbed(use)
    calls = context.graph.calls
    plain = calls.kind == CallKind.PLAIN
    now_ns = float(calls.call_ns[plain].sum())
    if now_ns <= 0:
        raise Refused(f"threads={value}: the step has no operators to share")
    crowding = _crowding(use) if waited else 1.0
    after_ns = _operators_ns(now_ns, use, load, count, waited=waited) * crowding
    factor = min(1.0, after_ns / now_ns) if waited else after_ns / now_ns
    scaled = replace(calls, call_ns=np.where(plain, calls.call_ns * factor, calls.call_ns))
    return Outcome(
        context=changed(context, replace(context.graph, calls=scaled)),
        assumptions=tuple(_assumptions(load, count, crowding, waited=waited)),
        spread=0.0,
        doubt=_DOUBT_DISTURBED if waited else _DOUBT,
    )


def _known_use(context: StepContext) -> tuple[CpuUse, HostLoad]:
    if not context.on_host or context.cpu is None:
        raise Refused("threads: the step does not compute on the CPU")
    if context.cpu.load is None:
        raise Refused(
            "threads: the number of threads and cores was not recorded. `stepscope run` records it"
        )
    return context.cpu, context.cpu.load


def _count_threads(value: str, load: HostLoad) -> int:
    if value == _FIT:
        return free_threads(load)
    count = parse_whole(value)
    if not 1 <= count <= _MAX_THREADS:
        raise WrongValue(f"threads={value}: give their number, such as 4, or fit")
    return count


def _operators_ns(now_ns: float, use: CpuUse, load: HostLoad, count: int, *, waited: bool) -> float:
    """All operators of a step with `count` threads that nothing disturbs."""
    if not waited:
        shared = use.long_share
        return now_ns * (1 - shared + shared / speedup(load.threads, count))
    modelled_ns = use.alone_short_ns + use.alone_long_ns / speedup(1, count)
    _, counters = looked(use)
    if counters is None or counters.used_cores is None or count > load.threads:
        return modelled_ns
    # Spinning threads use processor time too: one thread needs no more than all of it.
    used_ns = counters.used_cores * counters.wall_ns / counters.steps
    return min(modelled_ns, used_ns / speedup(1, count))


def _crowding(use: CpuUse) -> float:
    """Other processes stay, so a thread still waits for a core now and then."""
    load, counters = looked(use)
    if load is None or counters is None or not load.room:
        return 1.0
    return 1.0 + min(1.0, lost_to_others(counters) / load.room)


def _assumptions(load: HostLoad, count: int, crowding: float, *, waited: bool) -> list[str]:
    lines = [f"{counted(count, 'thread')} instead of {load.threads}"]
    if waited:
        lines.append(
            "operators are as fast as their fastest calls, or as one core's arithmetic. "
            "Threads that wait for each other hide how long the work is, so the interval is "
            "wide"
        )
    if crowding > 1:
        lines.append(f"other processes stay and make it {factor_text(crowding)} times as long")
    if not waited:
        lines.append(
            "operators of 0.2 ms and more gain with the power 0.8 of the number of threads"
        )
    return lines
