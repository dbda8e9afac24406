"""One rank's collectives of the whole run, put into the steps that made them.

Runs in the process that reads the rank. What comes back is small: at most MOST_CALLS collectives,
the same ones on all ranks, and a few numbers for each step. All ranks together keep at most
MOST_CELLS steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.records.run_calls import RunCalls

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.job import RankFolder
    from stepscope.records.run_calls import LoggedCollectives
    from stepscope.records.step_columns import StepColumns

    Flags = NDArray[np.bool_]
    Ints = NDArray[np.int64]

MOST_CALLS, MOST_STEPS = 20_000, 20_000
MANY_RANKS, FEWER = 64, 5  # with more ranks than that, a fifth of the calls and steps
# Of all ranks together, so that their columns and the matrices made of them fit in memory: with
# 10,000 ranks each one keeps 300 steps and 600 calls, and explaining them takes about 1 GB.
MOST_CELLS, CALLS_PER_STEP, LEAST_KEPT = 3_000_000, 2, 200
WARM_UP = 3  # steps
_STRETCH = 64  # calls, or steps, that are kept or left out together
_SHORT_STRETCH = 16  # steps, with many ranks
_GOLDEN = 0.6180339887498949  # multiples of it, without their whole parts, fill 0 to 1 evenly
_SLACK_NS = 1_000_000


def calls_of_folder(folder: RankFolder | None, steps: StepColumns | None) -> RunCalls | None:
    """None for a bare trace."""
    if folder is None:
        return None
    overlaps = bool(folder.layout.get("ddp"))
    world_size = folder.world_size
    return calls_of_run(folder.collectives, steps, asynchronous=overlaps, world_size=world_size)


def calls_of_run(
    log: LoggedCollectives | None,
    steps: StepColumns | None,
    *,
    asynchronous: bool = False,
    world_size: int | None = None,
) -> RunCalls | None:
    """None where either was not captured. `asynchronous`: DDP's buckets overlap its backward."""
    if log is None or steps is None or not len(log):
        return None
    usable = steps.plain & (steps.end_unix_ns > 0) & (steps.number >= WARM_UP)
    place = _step_of(log.created_ns, steps)
    kept = (place >= 0) & usable[place]
    on_host = all(name.startswith("gloo") for name in log.names)
    if (world_size or 0) > MANY_RANKS:
        if not on_host or asynchronous:
            kept = _ends_of_steps(log, place, kept)
        usable &= _with_calls(place[kept], len(steps))
        usable &= _sampled(steps.number, usable, int(kept.sum()), world_size or 1)
        kept &= usable[place]
    else:
        kept &= _thinned(log.sequence, kept, MOST_CALLS)
        usable &= _thinned(steps.number, usable, MOST_STEPS)
    if not kept.any() or not usable.any():
        return None
    return RunCalls(
        groups=log.groups,
        group=log.group[kept],
        sequence=log.sequence[kept],
        arrival_ns=log.created_ns[kept],
        number=steps.number[place[kept]],
        blocking=on_host and not asynchronous,
        on_host=on_host,
        steps=steps.number[usable],
        step_ns=steps.step_ns[usable],
        phases_ns={phase: ns[usable] for phase, ns in steps.phases_ns.items()},
        cpu_wait_ns=None if steps.cpu_wait_ns is None else steps.cpu_wait_ns[usable],
    )


def most_steps(world_size: int) -> int:
    """Steps of each rank that a large job keeps."""
    return min(MOST_STEPS // FEWER, max(LEAST_KEPT, MOST_CELLS // world_size))


def _ends_of_steps(log: LoggedCollectives, place: Ints, kept: Flags) -> Flags:
    """The first and the last call of every step and group: where no call waits, lateness grows from
    one to the next, so these two show it."""
    rows = np.flatnonzero(kept)
    if not len(rows):
        return kept
    order = rows[np.lexsort((log.sequence[rows], log.group[rows], place[rows]))]
    other = (np.diff(place[order]) != 0) | (np.diff(log.group[order]) != 0)
    ends: Flags = np.zeros(len(kept), np.bool_)
    ends[order[np.append(True, other)]] = True
    ends[order[np.append(other, True)]] = True
    return ends


def _with_calls(place: Ints, steps: int) -> Flags:
    called: Flags = np.zeros(steps, np.bool_)
    called[place] = True
    return called


def _sampled(number: Ints, usable: Flags, calls: int, world_size: int) -> Flags:
    """Short stretches of steps, spread evenly over the run by number alone: a rank that keeps fewer
    keeps some of those that the others keep."""
    most, count = most_steps(world_size), int(usable.sum())
    share = min(1.0, most / max(count, 1), CALLS_PER_STEP * most / max(calls, 1))
    place = (number // _SHORT_STRETCH * _GOLDEN) % 1.0
    while share < 1.0 and int((usable & (place < share)).sum()) > most:
        share *= 0.95
    chosen: Flags = place < share
    return chosen


def _step_of(created_ns: Ints, steps: StepColumns) -> Ints:
    """The place of the step in which each call was made, -1 between two steps."""
    if not len(steps):
        return np.full(len(created_ns), -1, np.int64)
    order = np.argsort(steps.end_unix_ns, kind="stable")
    ends = steps.end_unix_ns[order]
    after = np.searchsorted(ends, created_ns)
    place = order[np.minimum(after, len(ends) - 1)]
    began = steps.end_unix_ns[place] - steps.wall_ns[place] - _SLACK_NS
    inside: Ints = np.where((after < len(ends)) & (created_ns >= began), place, -1)
    return inside


def _thinned(number: Ints, wanted: Flags, most: int) -> Flags:
    """Leave out whole stretches, by number alone, until at most `most` are left."""
    every = 1
    while int((wanted & _in_stretch(number, every)).sum()) > most:
        every *= 2
    return _in_stretch(number, every)


def _in_stretch(number: Ints, every: int) -> Flags:
    chosen: Flags = (number // _STRETCH) % every == 0
    return chosen
