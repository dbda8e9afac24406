"""scan: backward through time by stepscope.fix.scan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.errors import UnreadableInputError
from stepscope.explain.recurrences import (
    LONG,
    Recurrence,
    RecurrentCalls,
    StepWindow,
    find_recurrences,
    owners,
)
from stepscope.predict.declaration import Outcome, Refused, changed
from stepscope.records.folders import user_folder
from stepscope.records.scan_costs import (
    FORWARD_HOST_US,
    LARGEST_SIZE,
    WORTH,
    cpu_chunk,
    cpu_states_us,
    gpu_layer_us,
)
from stepscope.step.edit import scale_calls, scale_tasks
from stepscope.step.replay import step_ns
from stepscope.text.figures import duration
from stepscope.trace.files import read_whole

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext
    from stepscope.step.graph import Flags, StepGraph

# What backward through time takes by the scan: as measured on this device, else by the model.

# Of the logarithm: the kernels' model is off by 14% in the mean on an H200 (tests/scan/
# test_scan_promises.py), and other devices were not measured; a table was measured on this device,
# though with other things around it.
_GPU_DOUBT, _CPU_DOUBT, _MEASURED_DOUBT = 0.4, 0.3, 0.1
# A loop of three calls a step took 0.21 to 0.35 of autograd's time for nn.RNN (T = 1024; B = 1 to
# 64; H = 20 to 128; two ARM cores). Loops in Python give autograd half as much again to do.
_LOOP_SHARE = {"layer": 0.28, "cells": 0.19, "loop": 0.19}


class ScanTime(msgspec.Struct, frozen=True, kw_only=True):
    """Backward of one recurrence, all of its layers, and what its forward takes longer than now;
    `doubt` is of the logarithm."""

    backward_ns: float
    forward_ns: float = 0.0
    doubt: float
    basis: str  # where the figure comes from, in words


def scan_time(
    recurrence: Recurrence, now: tuple[float, float], device: str | None, processors: int
) -> ScanTime:
    """`now` is forward and backward in nanoseconds; `device` is None for a CPU."""
    forward_ns, backward_ns = now
    ratio = _measured_ratio(recurrence, device or "cpu")
    if ratio is not None:
        left = backward_ns - (forward_ns + backward_ns) * (1 - ratio)
        return ScanTime(
            backward_ns=max(0.0, left),
            doubt=_MEASURED_DOUBT,
            basis="both measured on this GPU (by recommend)",
        )
    steps, batch, size = recurrence.steps, recurrence.batch, recurrence.size
    if device is None:
        chunked = cpu_states_us(cpu_chunk(steps, batch, size), steps, batch, size)
        share = _LOOP_SHARE[recurrence.form] * chunked / cpu_states_us(steps, steps, batch, size)
        basis = (
            "with a few calls per step instead of autograd's dozens, as measured on two ARM cores"
        )
        return ScanTime(backward_ns=share * backward_ns, doubt=_CPU_DOUBT, basis=basis)
    us = gpu_layer_us(steps, batch, size, recurrence.features, processors)
    basis = (
        "from a model of the kernels' cost, measured on an H200, so the interval is wide. "
        "stepscope.fix.scan.recommend measures it here"
    )
    return ScanTime(
        backward_ns=1e3 * us * recurrence.layers,
        forward_ns=1e3 * FORWARD_HOST_US * recurrence.layers,
        doubt=_GPU_DOUBT,
        basis=basis,
    )


def is_measured(recurrence: Recurrence, device: str | None) -> bool:
    """Whether `recommend` measured this shape on the device, or its neighbours."""
    return _measured_ratio(recurrence, device or "cpu") is not None


def _measured_ratio(recurrence: Recurrence, device: str) -> float | None:
    """The scan's time over torch's, forward and backward together, where `recommend` measured it
    here: for this number of steps, or between its neighbours."""
    known = dict(_measured(recurrence, device))
    below = [steps for steps in known if steps <= recurrence.steps]
    above = [steps for steps in known if steps >= recurrence.steps]
    if not below or not above:
        return None
    first, last = max(below), min(above)
    if first == last:
        return known[first]
    place = math.log(recurrence.steps / first) / math.log(last / first)
    return math.exp((1 - place) * math.log(known[first]) + place * math.log(known[last]))


def _measured(recurrence: Recurrence, device: str) -> Iterator[tuple[int, float]]:
    """Steps and ratios of the same batch, size and cell."""
    for key, text in _table(device).items():
        words = key.split()
        if len(words) != 5 or not all(map(str.isdecimal, words[:4])):
            continue
        steps, batch, size, _ = map(int, words[:4])
        wanted = (recurrence.batch, recurrence.size, recurrence.cell)
        times = _times(text)
        if (batch, size, words[4]) == wanted and times is not None and steps > 0:
            yield steps, times[1] / times[0]


def _times(text: Any) -> tuple[float, float] | None:
    try:
        torch_ms, scan_ms = msgspec.json.decode(text, type=tuple[float, float])
    except (msgspec.DecodeError, TypeError):
        return None
    return (torch_ms, scan_ms) if 0 < torch_ms < 1e9 and 0 < scan_ms < 1e9 else None


def _table(device: str) -> dict[str, Any]:
    """What stepscope.fix.scan.recommend kept for this device, of all its torch versions."""
    folder = user_folder("STEPSCOPE_CACHE_DIR", "", "XDG_CACHE_HOME", "~/.cache")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", device)
    joined: dict[str, Any] = {}
    for file in sorted(folder.glob(f"scan-{name}-torch-*.json")):
        joined |= _choices(file)
    return joined


def _choices(file: Path) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(read_whole(file))
        choices = content["choices"]
    except (UnreadableInputError, msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return {}
    return choices if isinstance(choices, dict) else {}


_HOST_NS = 300e3  # of one layer's launches; a loop makes several for each of its steps
_HORIZON = (
    "the gradient must reach far enough to matter: ask gradient_horizon first. Where only a "
    "few steps matter, truncation is cheaper than any scan"
)


class _ScannedRecurrence(msgspec.Struct, frozen=True, kw_only=True):
    """One recurrence of the step, as it is and as the scan would have it."""

    recurrence: Recurrence
    backward: Flags  # of the graph's tasks, or of a CPU step's calls
    backward_calls: Flags
    now_ns: float
    time: ScanTime

    @property
    def is_worth_it(self) -> bool:
        return self.now_ns > WORTH * self.scanned_ns

    @property
    def scanned_ns(self) -> float:
        """What takes the place of today's backward pass: the scan's forward pass is longer too."""
        return self.time.backward_ns + self.time.forward_ns

    def __str__(self) -> str:
        shape = self.recurrence
        words = (
            f"{shape.steps:,} steps, batch {shape.batch:,}, state of {shape.size:,}: backward "
            f"{duration(self.now_ns)} -> {duration(self.time.backward_ns)}, {self.time.basis}"
        )
        return words if self.is_worth_it else f"not worth it for {words}"


def predict(context: StepContext, _value: str) -> Outcome:
    """Refuses a step without a long recurrence. Where the scan pays for none of them, the step is
    predicted with all scanned: tune must know that it gets longer."""
    found = find_recurrences(context.trace, _window(context))
    changes = [
        change
        for place, calls in enumerate(found)
        if _fits(context, calls.recurrence)
        and (change := _change(context, found, place)) is not None
    ]
    if not changes:
        raise Refused(f"scan: {_why_none([one.recurrence for one in found])}")
    scanned = [change for change in changes if change.is_worth_it] or changes
    graph = context.graph
    for change in scanned:
        graph = _scanned(context, graph, change)
    wrong_ns = sum(change.time.doubt * change.time.backward_ns for change in scanned)
    return Outcome(
        context=changed(context, graph),
        assumptions=(_HORIZON, *map(str, changes)),
        spread=0.0,
        doubt=wrong_ns / max(1.0, step_ns(graph)),
    )


def _window(context: StepContext) -> StepWindow:
    """From the step's first call to the end of its last one, with the operators around them."""
    host, calls = context.trace.host, context.graph.calls
    rows = np.concatenate((calls.row[calls.row >= 0], calls.operator[calls.operator >= 0]))
    if not len(rows):
        return StepWindow(start_ns=0, end_ns=0)
    ends = host.start_ns[rows] + host.dur_ns[rows]
    return StepWindow(start_ns=int(host.start_ns[rows].min()), end_ns=int(ends.max()))


def _fits(context: StepContext, recurrence: Recurrence) -> bool:
    """A gated layer only where the scan was measured: there is no model of its cost."""
    if recurrence.is_plain:
        return context.on_host or recurrence.size <= LARGEST_SIZE
    return recurrence.form == "layer" and is_measured(recurrence, _device(context))


def _device(context: StepContext) -> str | None:
    return None if context.on_host else context.trace.device_name or ""


def _change(
    context: StepContext, found: Sequence[RecurrentCalls], place: int
) -> _ScannedRecurrence | None:
    """None if the step has no backward pass through it."""
    calls, tasks = context.graph.calls, context.graph.tasks
    owner, in_backward = owners(context.trace, found, calls.operator)
    backward_calls = (owner == place) & in_backward
    forward_calls = (owner == place) & ~in_backward
    if context.on_host:
        backward, forward = backward_calls, forward_calls
        item_ns = calls.gap_ns + calls.call_ns
    else:
        backward, forward = backward_calls[tasks.call], forward_calls[tasks.call]
        item_ns = tasks.dur_ns
    now_ns = float(item_ns[backward].sum())
    if now_ns <= 0:
        return None
    recurrence = found[place].recurrence
    time = scan_time(
        recurrence,
        (float(item_ns[forward].sum()), now_ns),
        _device(context),
        context.multiprocessors,
    )
    return _ScannedRecurrence(
        recurrence=recurrence,
        backward=backward,
        backward_calls=backward_calls,
        now_ns=now_ns,
        time=time,
    )


def _scanned(context: StepContext, graph: StepGraph, change: _ScannedRecurrence) -> StepGraph:
    factor = change.scanned_ns / change.now_ns
    if context.on_host:
        return scale_calls(graph, change.backward, factor)
    graph = scale_tasks(graph, change.backward, factor)
    calls = context.graph.calls
    host_ns = float((calls.gap_ns + calls.call_ns)[change.backward_calls].sum())
    target_ns = _HOST_NS * change.recurrence.layers
    if host_ns <= target_ns:
        return graph
    return scale_calls(graph, change.backward_calls, target_ns / host_ns)


def _why_none(found: Sequence[Recurrence]) -> str:
    if any(one.is_plain for one in found):
        return f"states are larger than {LARGEST_SIZE}, or the step has no backward pass"
    if found:
        return (
            "the time of a scan of an LSTM or a GRU of this shape is unknown. Measure it on "
            'the GPU: stepscope.fix.scan.recommend(steps, batch, size, cell="lstm") (or '
            '"gru")'
        )
    return (
        f"no recurrence of {LONG} steps or more was found. Shapes must be recorded "
        "(record_shapes=True, or stepscope run)"
    )
