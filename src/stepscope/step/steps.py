"""Find the steps of a trace, by their marks or by what the loop repeats, and the steady
cycle that amounts per step are taken over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from stepscope.records.explanation import Step, Steps, StepsSource
from stepscope.records.trace import DeviceKind, HostKind, Trace
from stepscope.step.arrays import Bools, Indices, Int64s
from stepscope.step.work import DATA_LOADING, Kind, Work, below, launches_of, rows_named
from stepscope.trace.links import distinct

_PROFILER_STEP = re.compile(r"^ProfilerStep")


def find_steps(trace: Trace, work: Work) -> Steps:
    """From the profiler's marks; else from optimizer steps; else from what repeats. Without any of
    them there are no steps: the window is a span of time."""
    steps = _marked(trace, _PROFILER_STEP)
    if steps:
        return _with_cycles("profiler", steps, trace, work)
    ends = [step.start_ns + step.dur_ns for step in _marked(trace, OPTIMIZER_STEP)]
    if len(ends) >= 2:
        # How many optimizer steps one training step makes: two in a GAN, whose backward
        # passes take turns.
        calls = _list_calls(trace, work)
        nodes = np.flatnonzero(calls.backward)
        places = np.searchsorted(calls.start_ns[nodes], np.array(ends, np.int64))
        ends = ends[:: (_period(_signatures(calls.name[nodes], places)) or 1)]
        steps = tuple(
            Step(name=f"between optimizer steps {i} and {i + 1}", start_ns=a, dur_ns=b - a)
            for i, (a, b) in enumerate(pairwise(ends))
        )
        return _with_cycles("optimizer", steps, trace, work)
    if ends and (only := only_step(trace, ends[0])) is not None:
        return _with_cycles("optimizer", (only,), trace, work)
    repeats = find_repeats(trace, work)
    if repeats is not None:
        found = _with_cycles("repeated", repeats.steps, trace, work)
        return replace(found, repeats=repeats.what)
    start, end = work.extent
    return Steps(source="window", steps=(), cycles_ns=(), window_start_ns=start, window_end_ns=end)


def _marked(trace: Trace, pattern: re.Pattern[str]) -> tuple[Step, ...]:
    host = trace.host
    rows = np.flatnonzero(rows_named(trace, host, host.kind != HostKind.PYTHON, pattern.match))
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    return tuple(
        Step(
            name=trace.strings[host.name[row]],
            start_ns=int(host.start_ns[row]),
            dur_ns=int(host.dur_ns[row]),
        )
        for row in rows.tolist()
    )


def step_of(steps: tuple[Step, ...], times: Int64s) -> Int64s:
    """Index of the step that each host time falls into, or -1."""
    if not steps:
        return np.full(len(times), -1)
    starts = np.array([step.start_ns for step in steps], np.int64)
    ends = np.array([step.start_ns + step.dur_ns for step in steps], np.int64)
    place = np.searchsorted(starts, times, side="right") - 1
    inside = (place >= 0) & (times < ends[np.maximum(place, 0)])
    return np.where(inside, place, -1)


def _with_cycles(source: StepsSource, steps: tuple[Step, ...], trace: Trace, work: Work) -> Steps:
    first, edges = _cycle_edges(steps, trace, work)
    if source != "profiler" and len(edges) and not work.on_host:
        edges = _close(edges, steps[-1], trace, work)
    start, end = (int(edges[0]), int(edges[-1])) if len(edges) >= 2 else work.extent
    return Steps(
        source=source,
        steps=steps,
        cycles_ns=tuple(np.diff(edges).tolist()),
        first_cycle=first,
        window_start_ns=start,
        window_end_ns=end,
    )


def _lacks_in_last(steps: tuple[Step, ...], updates: tuple[Step, ...]) -> bool:
    """Whether the last step holds fewer of these than every other."""
    which = step_of(steps, np.array([one.start_ns for one in updates], np.int64))
    held = np.bincount(which[which >= 0], minlength=len(steps))
    return len(steps) > 1 and bool(held[-1] < held[:-1].min())


def _cycle_edges(steps: tuple[Step, ...], trace: Trace, work: Work) -> tuple[int, Int64s]:
    """The start of each step's first work; on the CPU, the steps' starts and the last end.

    A last step that launched nothing, because the window closed, is left out; on the CPU, one
    with fewer optimizer steps than all others: the training ended there. The optimizer's step may
    be compiled, and leave no mark: then the backward pass counts.
    """
    none = np.empty(0, np.int64)
    if work.on_host:
        last = steps[-1]
        edges = np.array([s.start_ns for s in steps] + [last.start_ns + last.dur_ns], np.int64)
        updates = _marked(trace, OPTIMIZER_STEP) or _marked(trace, BACKWARD_NODE)
        if _lacks_in_last(steps, updates):
            edges = edges[:-1]
        return 0, edges if (np.diff(edges) > 0).all() else none
    launch = launches_of(trace, work)
    linked = np.flatnonzero(launch >= 0)
    which = step_of(steps, trace.host.start_ns[launch[linked]])
    never = np.iinfo(np.int64).max
    first = np.full(len(steps), never, np.int64)
    inside = which >= 0
    np.minimum.at(first, which[inside], work.start_ns[linked[inside]])
    working = np.flatnonzero(first < never)
    edges = first[working]
    unbroken = len(working) >= 2 and working[-1] - working[0] == len(working) - 1
    if len(working) == 1 == len(steps):
        return 0, edges
    if not unbroken or (np.diff(edges) <= 0).any():
        return 0, none
    return int(working[0]), edges


def _close(edges: Int64s, last: Step, trace: Trace, work: Work) -> Int64s:
    """End the last step where the next one's work begins, although nothing marks that one. A single
    step without a next one ends with its own work, so that start-up is no part of it."""
    launch = launches_of(trace, work)
    linked = np.flatnonzero(launch >= 0)
    launched_ns = trace.host.start_ns[launch[linked]]
    end_ns = last.start_ns + last.dur_ns
    later = work.start_ns[linked[launched_ns >= end_ns]]
    end = int(later.min()) if len(later) else 0
    if len(edges) == 1 and not end:
        mine = (launched_ns >= last.start_ns) & (launched_ns < end_ns)
        end = int(work.end_ns[linked[mine]].max())
    return np.append(edges, np.int64(end)) if end > edges[-1] else edges


# Steps of a trace without step marks: what the training or inference loop repeats.
#
# A training step repeats its backward passes. A loop without a backward pass needs a sign of its
# own where an iteration begins, because the layers of one forward pass repeat as well: a call of
# the outermost module, a batch, a copy to the device, a synchronisation or an annotation. After the
# last iteration may come a part of the next one, and nothing else: what follows the last layer of a
# forward pass is no layer.

BACKWARD_NODE = re.compile(r"autograd::engine::evaluate_function")
OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#")
_MODULE = re.compile(r"^nn\.Module: ")
_SYNC = re.compile(r"(?:Device|Stream|Context)Synchronize")
_TO_DEVICE = re.compile(r"HtoD|HostToDevice|Host -> Device", re.IGNORECASE)
# What libraries annotate inside a step, and what wraps many of them.
_OF_LIBRARIES = re.compile(
    r"^(?:Optimizer\.|ProfilerStep|nccl:|gloo:|mpi:|c10d::|FSDP::|FullySharded|DistributedData|"
    r"Torch-Compiled|CompiledFunction|TorchDynamo|PyTorch Profiler|\[|## Call)"
)
_DIGITS = re.compile(r"\d+")
_MOST_IN_STEP = 16  # passes or calls of one step
_ALIKE = 0.9  # of the iterations: some log, or save the model


class Repeats(NamedTuple):
    """Where each iteration begins, and the end of the last one."""

    edges_ns: Int64s
    what: str  # repeats, in words

    @property
    def steps(self) -> tuple[Step, ...]:
        edges = self.edges_ns.tolist()
        return tuple(
            Step(name=f"iteration {number}", start_ns=start, dur_ns=end - start)
            for number, (start, end) in enumerate(pairwise(edges), 1)
        )


class _OutermostCalls(NamedTuple):
    """Operators that no other operator calls, in the order of their start."""

    rows: Indices
    start_ns: Int64s
    name: Indices
    backward: Bools


def find_repeats(trace: Trace, work: Work) -> Repeats | None:
    """None where nothing shows what an iteration is."""
    calls = _list_calls(trace, work)
    if not len(calls.rows):
        return None
    if calls.backward.any():
        # From the start of a backward pass to that of the next, if they are alike.
        # Leave out what hooks do on autograd's own thread: they would divide a backward
        # pass.
        thread = trace.host.thread[calls.rows]
        own = np.isin(thread, thread[calls.backward]) & ~calls.backward
        if own.all() or not (~own & ~calls.backward).any():
            calls = calls  # forward runs there, too
        else:
            rows, start_ns, name, backward = calls
            calls = _OutermostCalls(rows[~own], start_ns[~own], name[~own], backward[~own])
        nodes = calls.backward
        first = np.flatnonzero(nodes & ~np.append(False, nodes[:-1]))
        names = np.where(nodes, calls.name, -1)
        passes = [
            hash(part[part >= 0].tobytes())
            for part in np.split(names, first[1:])
            if (part >= 0).any()
        ]
        period = _period(passes)
        if period is None:
            return None
        firsts = calls.start_ns[first[::period]]
        updates = rows_named(
            trace, trace.host, trace.host.kind != HostKind.PYTHON, OPTIMIZER_STEP.match
        )
        times = trace.host.start_ns[updates]
        counts = np.diff(np.searchsorted(np.sort(times), firsts))
        if len(times) and not (len(counts) and counts.all()):
            return None  # the passes of one step, whose gradients add up
        return Repeats(firsts, "backward passes") if len(firsts) > 1 else None
    for what, starts in _signs(trace, work):
        edges = _equal_iterations(calls, starts, work.extent[1]) if len(starts) > 1 else None
        if edges is not None and _computes(trace, work, edges):
            return Repeats(edges, what)
    return None


def _list_calls(trace: Trace, work: Work) -> _OutermostCalls:
    host = trace.host
    operator = host.kind == HostKind.OPERATOR
    outermost = operator & ~below(trace, operator)
    backward = rows_named(trace, host, outermost, BACKWARD_NODE.search)
    threads = distinct(np.append(work.threads, host.thread[backward]))
    rows = np.flatnonzero(outermost & np.isin(host.thread, threads))
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    return _OutermostCalls(
        rows, host.start_ns[rows], host.name[rows].astype(np.intp), backward[rows]
    )


def _signs(trace: Trace, work: Work) -> Iterator[tuple[str, Int64s]]:
    """What may begin an iteration without a backward pass, the surest sign first."""
    host = trace.host
    feeding = work.feeds(host.thread)
    module = rows_named(trace, host, feeding & (host.kind == HostKind.PYTHON), _MODULE.match)
    outermost = module & ~below(trace, module)
    names = host.name[outermost]
    if len(names):
        # One model; another one, such as a loss, is called inside the iteration.
        yield "calls of the model", np.sort(host.start_ns[outermost & (host.name == names[0])])
    note = feeding & (host.kind == HostKind.ANNOTATION)
    loading = rows_named(trace, host, note, DATA_LOADING.search)
    yield "batches of the data loader", np.sort(host.start_ns[loading])
    own = note & ~loading & ~rows_named(trace, host, note, _OF_LIBRARIES.match)
    for name, starts in _by_annotation(trace, own):
        yield f"the annotation {name!r}", starts
    if not work.on_host:
        device = trace.device
        copy = rows_named(trace, device, device.kind == DeviceKind.MEMCPY, _TO_DEVICE.search)
        launch = device.launch[copy]
        yield "copies to the device", np.sort(host.start_ns[launch[launch >= 0]])
        runtime = feeding & (host.kind == HostKind.RUNTIME)
        wait = rows_named(trace, host, runtime, _SYNC.search)
        yield "synchronisations", np.sort(host.start_ns[wait] + host.dur_ns[wait])


def _by_annotation(trace: Trace, rows: Bools) -> Iterator[tuple[str, Int64s]]:
    """Annotations of one name, without numbers; those that take most time first."""
    host = trace.host
    found: dict[str, list[int]] = {}
    for row in np.flatnonzero(rows).tolist():
        found.setdefault(_DIGITS.sub("#", trace.strings[host.name[row]]), []).append(row)
    for name, group in sorted(found.items(), key=lambda one: -int(host.dur_ns[one[1]].sum())):
        yield name, np.sort(host.start_ns[group])


def _signatures(names: Indices, places: Int64s) -> list[int]:
    """One number for the calls between each two places."""
    return [hash(names[a:b].tobytes()) for a, b in pairwise(places.tolist())]


def _period(parts: list[int]) -> int | None:
    """After how many parts the loop begins again; None if it does not."""
    codes = np.array(parts, np.int64)
    for period in range(1, min(_MOST_IN_STEP, len(codes) - 1) + 1):
        if period > 1 and len(codes) < 2 * period:
            return None
        if (codes[period:] == codes[:-period]).mean() >= _ALIKE:
            return period
    return None


def _equal_iterations(calls: _OutermostCalls, starts: Int64s, end_ns: int) -> Int64s | None:
    """The starts whose iterations make the same calls, and the end of the last whole one."""
    places = np.searchsorted(calls.start_ns, starts)
    begins = np.flatnonzero(np.diff(places, append=len(calls.rows)) > 0)  # those with calls
    starts, places = starts[begins], places[begins]
    tail = calls.name[places[-1] :] if len(places) else calls.name
    parts = [*_signatures(calls.name, places), hash(tail.tobytes())]
    whole = _period(parts)
    ends_whole = whole is not None and parts[-1] == parts[-1 - whole]
    if whole is not None and ends_whole and len(parts) % whole == 0:
        return np.append(starts[::whole], np.int64(max(end_ns, int(starts[-1]) + 1)))
    period = _period(parts[:-1])
    if period is None:
        return None
    edges = places[::period]
    unit = calls.name[edges[-2] : edges[-1]]
    rest = calls.name[edges[-1] :]
    if len(rest) > len(unit) or not np.array_equal(rest, unit[: len(rest)]):
        return None
    return starts[::period]


def _computes(trace: Trace, work: Work, edges_ns: Int64s) -> bool:
    """Whether each iteration launches some compute: copies of weights at the start are none."""
    launch = launches_of(trace, work)
    rows = launch[(work.kind == Kind.COMPUTE) & (launch >= 0)]
    held = np.diff(np.searchsorted(np.sort(trace.host.start_ns[rows]), edges_ns))
    return len(held) > 0 and bool(held.all())


def only_step(trace: Trace, end_ns: int) -> Step | None:
    """The step that ends with the trace's only optimizer step: it begins with the first operator
    of the forward pass, so that start-up is no part of it."""
    host = trace.host
    before = (host.forward_of >= 0) & (host.start_ns < end_ns)
    if not before.any():
        return None
    start = int(host.start_ns[host.forward_of[before]].min())
    return Step(name="up to the optimizer step", start_ns=start, dur_ns=end_ns - start)
