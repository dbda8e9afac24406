"""The calls of ranks that train together, made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from stepscope.records.job import CollectiveCalls, RankPart, RankSteps, RunCalls

STEP_NS = 30_000_000
BEGAN_NS = 1_700_000_000_000_000_000


def run_of(
    late_ns: np.ndarray, *, calls_per_step: int = 1, first: int = 3, **changes: Any
) -> RunCalls:
    """A rank that arrives this much after the step's beginning, in each of its calls alike."""
    steps = np.arange(first, first + len(late_ns))
    number = np.repeat(steps, calls_per_step)
    place = np.tile(np.arange(calls_per_step), len(steps))
    arrival = BEGAN_NS + number * STEP_NS + place * 1_000_000
    arrival = arrival + np.repeat(np.round(late_ns).astype(np.int64), calls_per_step)
    usual: dict[str, Any] = {
        "groups": ("0",),
        "group": np.zeros(len(number), np.int32),
        "sequence": np.arange(len(number)) + first * calls_per_step,
        "arrival_ns": arrival,
        "number": number,
        "blocking": False,
        "on_host": True,
        "steps": steps,
        "step_ns": np.full(len(steps), STEP_NS),
        "phases_ns": {"forward": np.full(len(steps), 10_000_000)},
    }
    return RunCalls(**{**usual, **changes})


def part_of(rank: int, run: RunCalls | None, **changes: Any) -> RankPart:
    """A rank whose trace shows nothing."""
    ints, places = np.empty(0, np.int64), np.empty(0, np.int32)
    times = ("size_bytes", "sequence", "arrival_ns", "start_ns", "end_ns", "exposed_ns")
    calls = CollectiveCalls(
        groups=(),
        kind=np.empty(0, np.int8),
        group=places,
        peer=places,
        step=places,
        **dict.fromkeys(times, ints),
    )
    parts = ("number", "start_ns", "dur_ns", "compute_ns", "exposed_comm_ns", "input_ns")
    pace = RankSteps(**dict.fromkeys(parts, ints))
    return RankPart(rank=rank, calls=calls, pace=pace, run=run, **changes)
