"""A change of level says what takes longer since."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.findings.loop import slows_down
from stepscope.explain.whole_run.rank_run import explain_run
from stepscope.records.rank import StepColumns

from .columns import columns


def changed(*, data: float = 0.0, core: float = 0.0) -> StepColumns:
    """From step 200 of 400 on, steps take 15 ms longer: so much of it in the loader, and so much
    without a core."""
    later = np.where(np.arange(400) < 200, 0.0, 1.0)
    wall = 5 * np.exp(np.random.default_rng(0).normal(0, 0.02, 400)) + 15 * later
    return columns(wall, data=0.5 + data * later, cpu_wait_ns=core * later)


def test_each_phase_and_the_wait_for_a_core_are_compared() -> None:
    (change,) = explain_run(changed(data=15.0, core=2.0)).changes
    assert change.more_ms == pytest.approx(
        {"data": 15.0, "forward": 0.0, "core_wait": 2.0}, abs=0.1
    )


@pytest.mark.parametrize(
    ("steps", "words", "first"),
    [
        (changed(data=14.0), "14.0 ms of it waiting for data", "late-window"),
        (changed(core=12.0), "12.0 ms of it waiting for a core", "idle-machine"),
        (changed(), "20.0 ms instead of 5.00 ms, 15.0 ms of it in forward.", "late-window"),
    ],
)
def test_the_finding_names_what_most_of_the_change_is(
    steps: StepColumns, words: str, first: str
) -> None:
    finding = slows_down.judge(explain_run(steps))
    assert finding is not None
    assert words in finding.summary
    assert finding.remedies[0].id == first
