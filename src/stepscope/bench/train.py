"""Train one workload: an ordinary training script, which knows nothing of capture; and the
machine's pace beside its steps.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from stepscope.bench.catalogue import load
from stepscope.bench.request import options_parser
from stepscope.bench.steps import StepMarks
from stepscope.bench.workload import TrainingPlace
from stepscope.records.normal import median

# A workload's step beside a yardstick: fixed work that is timed in turns with it.
#
# A processor that others use too changes its pace within seconds, for the step and for the
# yardstick alike: their ratio stays. The yardstick is work of the kinds a training does (products,
# element by element, rows picked from a table, many small calls), without autograd, so that capture
# does not take it for a step.

WARM_UP = 10  # pairs
FEWEST_PAIRS, MOST_PAIRS = 40, 2000
_LEFT_OUT = 0.05  # of the ratios at each end: pauses hit the step or the yardstick alone
_WIDTH, _PRODUCTS = 256, 9
_TABLE_ROWS, _PICKED = 100_000, 4096
_SMALL_CALLS = 100


class StepOverYardstick(NamedTuple):
    """How many yardsticks a step takes, and computes: the latter by processor time."""

    step: float
    computing: float


class Yardstick:
    """The same work each time, on one processor."""

    def __init__(self) -> None:
        self._matrix = torch.linspace(-1.0, 1.0, _WIDTH * _WIDTH).reshape(_WIDTH, _WIDTH)
        self._table = torch.zeros(_TABLE_ROWS, 64)
        self._picked = torch.arange(_PICKED) * (_TABLE_ROWS // _PICKED)
        self._small = torch.zeros(8)

    def __call__(self) -> None:
        values = self._matrix
        for _ in range(_PRODUCTS):
            values = torch.tanh(values @ self._matrix)
        rows = self._table[self._picked]
        self._table.index_add_(0, self._picked, rows, alpha=0.1)
        for _ in range(_SMALL_CALLS):
            self._small.add_(1.0)


def step_over_yardstick(
    step: Callable[[int], object], yardstick: Callable[[], object], seconds: float
) -> StepOverYardstick:
    """From so many seconds of both in turns."""
    for number in range(WARM_UP):
        step(number)
        yardstick()
    steps: list[tuple[float, float]] = []
    yards = [_seconds(yardstick)]
    end = time.monotonic() + seconds
    while len(steps) < FEWEST_PAIRS or (len(steps) < MOST_PAIRS and time.monotonic() < end):
        steps.append(_seconds(partial(step, WARM_UP + len(steps))))
        yards.append(_seconds(yardstick))
    of_steps, of_yards = (list(zip(*times, strict=True)) for times in (steps, yards))
    return StepOverYardstick(*map(middle_ratio, of_steps, of_yards))


def middle_ratio(steps: Sequence[float], yards: Sequence[float]) -> float:
    """Each step over the yardsticks before and after it (one more than steps): the geometric mean
    without the ends."""
    around = (np.asarray(yards[:-1]) + np.asarray(yards[1:])) / 2
    logs = np.sort(np.log(np.asarray(steps) / around))
    left_out = int(_LEFT_OUT * len(logs))
    return float(np.exp(logs[left_out : len(logs) - left_out].mean()))


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of this thread on a processor."""
    start, start_thread = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - start, time.thread_time() - start_thread


# The machine's pace before a run: how long a fixed piece of arithmetic takes.
#
# Saved with every run, so that a later comparison can say whether the machine itself has become
# slower. Nothing is corrected by it.

REPEATS = 15
_CPU_WIDTH, _DEVICE_WIDTH = 192, 2048  # a millisecond or less each
_FIXED_PRODUCTS = 8


def time_fixed_work(device: torch.device) -> float:
    """Milliseconds that the same matrix products and Python calls take: the median of REPEATS."""
    width = _CPU_WIDTH if device.type == "cpu" else _DEVICE_WIDTH
    values = torch.linspace(-1.0, 1.0, width * width, device=device).reshape(width, width)

    def work() -> None:
        out = values
        for _ in range(_FIXED_PRODUCTS):
            out = torch.tanh(out @ values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = [_seconds(work)[0] for _ in range(3 + REPEATS)][3:]  # the first ones warm up
    if device.type == "cuda":  # the workload's own peak counts, not this one's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 1e3 * median(seconds)


# python -m stepscope.bench.train NAME [--size tiny] [--steps N] [--seed 0] [--set batch=4]
# torchrun --nproc-per-node=2 -m stepscope.bench.train NAME ...


def main() -> None:
    parser = options_parser(__doc__ or "")
    options = parser.parse_args()
    if options.paced and options.losses is None:
        parser.error("--paced writes its ratio to a file, so --losses FILE is needed")
    workload = load(options.name)
    changes = dict(change.split("=", 1) for change in options.set)
    config = workload.config(options.size, changes)
    steps = options.steps or workload.targets[options.size].steps
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    place = TrainingPlace(device, rank=rank, ranks=ranks, seed=options.seed)
    if options.size == "tiny" and place.device.type == "cpu":
        torch.set_num_threads(1)  # several would wait for each other where others use the cores
    pace_ms = time_fixed_work(place.device) if options.losses else None
    torch.manual_seed(options.seed)
    step = workload.build(config, place)
    if options.paced:
        ratio = step_over_yardstick(step, Yardstick(), options.paced)
        ratios = {"step_over_yardstick": ratio.step, "computing_over_yardstick": ratio.computing}
        options.losses.write_text(json.dumps(ratios))
        return
    alone = place.device.type == "cpu" and place.ranks == 1  # it waits for no device and no rank
    marks = StepMarks.here() if options.losses and alone else None
    # Losses stay on the device: reading each would make the host wait for it.
    losses = []
    for number in range(steps):
        losses.append(step(number).detach())
        if marks is not None:
            marks.step_ended()
    parts = marks.parts() if marks is not None else None
    values = torch.stack([loss.reshape(()) for loss in losses]).tolist()
    if place.rank == 0:
        print(f"{workload.name}: loss {values[0]:.4g} -> {values[-1]:.4g} in {steps} steps")  # noqa: T201
        if options.losses:
            finite = [value if math.isfinite(value) else None for value in values]
            content = {"losses": finite, "calibration_ms": pace_ms, "parts": parts}
            options.losses.write_bytes(msgspec.json.encode(content))
    if place.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
