"""Steps that compute on the CPU, and the load of the machine they ran on, made for tests."""

from __future__ import annotations

from typing import Any

from stepscope.records.rank_facts import HostLoad, OtherProgram, PlainSteps

from .build import Events, op, step

FLOAT = ["float", "float"]
LARGE = ("aten::mm", [[1024, 1024], [1024, 1024]], 20_000.0)  # 2.1 GFLOP in 20 ms: 107 GFLOP/s
SLOW = ("aten::mm", [[512, 512], [512, 512]], 20_000.0)  # 0.27 GFLOP in 20 ms: 13 GFLOP/s
SMALL = ("aten::add", [[8, 8], [8, 8]], 8.0)
SECOND = 1_000_000_000


def steps(calls: list[tuple[str, Any, float]], *, count: int = 5, stall: float = 0.0) -> Events:
    """The same calls in every step, one after the other; every second step's are `stall` longer."""
    events: Events = []
    now = 0.0
    for number in range(count):
        began = now
        inside: Events = []
        for name, shapes, dur in calls:
            took = dur + (stall if number % 2 else 0.0)
            inside += op(name, start=now + 1, dur=took, shapes=shapes, dtypes=FLOAT)
            now += took + 1
        events += step(number, start=began, dur=now - began) + inside
    return events


def counters(**changes: Any) -> PlainSteps:
    """Ten seconds of a machine with 4 cores on which nobody waits."""
    told = {
        "steps": 100, "wall_ns": 10 * SECOND, "user_ns": 10 * SECOND, "system_ns": 0,
        "voluntary": 10, "involuntary": 10, "waiting_ns": 0, "training_waiting_ns": 0,
        "busy_ns": 10 * SECOND, "stolen_ns": 0, "throttled_ns": 0, "job_ns": 10 * SECOND,
    }  # fmt: skip
    return PlainSteps(**(told | changes))


def load_of(plain: PlainSteps | None, **changes: Any) -> HostLoad:
    told: dict[str, Any] = {
        "threads": 1, "cores": 4, "local_ranks": 1, "flush_denormal": False,
        "denormal_share": 0.0, "capability": "AVX512", "offered": "AVX512", "onednn": True,
    }  # fmt: skip
    return HostLoad(plain=plain, **(told | changes))


# The training thread waits 6 of 10 s for a core, three other threads 5 s each.
CROWDED = counters(
    waiting_ns=21 * SECOND, training_waiting_ns=6 * SECOND, involuntary=5000,
    user_ns=12 * SECOND, busy_ns=40 * SECOND, job_ns=12 * SECOND,
    others=(OtherProgram(name="backup", cores=2.8),),
)  # fmt: skip
