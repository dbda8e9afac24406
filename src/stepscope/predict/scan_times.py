"""What backward through time takes by the scan: as measured on this device, else by the model."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.records.scan_costs import FORWARD_HOST_US, cpu_chunk, cpu_states_us, gpu_layer_us
from stepscope.records.user_folders import user_folder
from stepscope.trace.regular_files import read_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stepscope.explain.recurrences import Recurrence

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
