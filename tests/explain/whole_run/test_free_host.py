"""Which of its measured times is the host's own, by what the trace shows about the step."""

from __future__ import annotations

import pytest

from benches import analyse
from stepscope.records.rank_facts import HostStepTimes

from ..build import Events, call, kernel, step
from ..conftest import Read
from .columns import columns

STOPPED_MS, FREE_MS = 14.0, 11.0


def device_steps(*, waits: bool) -> list[Events]:
    events = []
    for number in range(4):
        at = 1000.0 * number
        events += [
            step(number, start=at, dur=900),
            kernel("gemm", start=at + 50, dur=600, launched_at=at + 10),
        ]
        if waits:
            events.append(call("cudaStreamSynchronize", start=at + 20, dur=640))
    return events


@pytest.mark.parametrize(("waits", "own_ms"), [(False, FREE_MS), (True, STOPPED_MS)])
def test_a_step_that_never_waits_shows_its_host_where_the_queue_was_empty(
    read: Read, waits: bool, own_ms: float
) -> None:
    wall = [40.0, FREE_MS, 30.0] * 4
    steps = columns(wall, window=(0, 3, 6, 9))
    stopped = HostStepTimes(forward_ns=round(STOPPED_MS * 1e6))
    analysis = analyse(read(*device_steps(waits=waits)), steps=steps, host_steps=(stopped,) * 3)
    assert analysis.host_phases_ns["forward"] == pytest.approx(own_ms * 1e6)
