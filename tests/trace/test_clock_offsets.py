"""One clock against another over hours: offsets, drift, error bars, and clocks that were set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepscope.records.job import Rounds
from stepscope.trace.clock_offsets import (
    KEPT_DRIFT,
    MAX_DRIFT,
    WANDER,
    ClockOffsets,
    compare_rounds,
    offset_at,
)

S, US = 1_000_000_000, 1_000
EPOCH = 1_789_000_000 * S  # int64 must stay exact


def meeting(step: int, at_ns: int, half_ns: int = 0, perf: int | None = None) -> Rounds:
    """Three rounds; the middle one is the tightest."""
    at = EPOCH + at_ns + np.array([0, S // 1000, 2 * S // 1000])
    half = np.array([3, 1, 2]) * half_ns
    return Rounds(
        label="run", step=step, came_ns=at - half, left_ns=at + half, perf_to_unix_ns=perf
    )


def compare(
    offsets_us: list[int], *, every_s: int = 100, half_us: int = 10, **changes: Any
) -> ClockOffsets:
    """Meetings at steps 100, 200, ...: the reference is exact, the other clock is off by this."""
    theirs = [meeting(100 * n, n * every_s * S) for n in range(1, len(offsets_us) + 1)]
    mine = [
        meeting(100 * n, n * every_s * S + offset * US, half_us * US)
        for n, offset in enumerate(offsets_us, 1)
    ]
    offsets = compare_rounds(mine, theirs, **changes)
    assert offsets is not None
    return offsets


def at(offsets: ClockOffsets, seconds: float, step: int, offset_us: float = 0) -> tuple[Any, ...]:
    times = np.array([EPOCH + round(seconds * S) + round(offset_us * US)])
    offset, error, known = offset_at(offsets, times, np.array([step]))
    return float(offset[0]) / US, float(error[0]) / US, bool(known[0])


def test_a_meeting_is_as_good_as_its_shortest_round() -> None:
    offsets = compare([5000])
    assert offsets.offset_ns.tolist() == [5000 * US]
    assert offsets.error_ns.tolist() == [10 * US]
    assert offsets.mean_drift is None


def test_between_two_meetings_the_offset_changes_evenly() -> None:
    """1 ms in 100 s are 10 ppm; half-way the drift may have differed for 50 s."""
    offsets = compare([5000, 6000])
    assert offsets.mean_drift == pytest.approx(10e-6, rel=1e-4)
    offset, error, known = at(offsets, 150, 150, 5500)
    assert offset == pytest.approx(5500, abs=0.1)
    assert error == pytest.approx(10 + 50e6 * WANDER, rel=1e-4)  # ±10 µs, and 2 ppm over 50 s
    assert known


def test_at_a_meeting_the_error_is_that_of_the_meeting() -> None:
    offsets = compare([5000, 6000, 7000])
    offset, error, _ = at(offsets, 200, 200, 6000)
    assert (offset, error) == (pytest.approx(6000), pytest.approx(10, rel=1e-4))


def test_a_drift_that_changes_widens_the_error_around_the_change() -> None:
    """10 ppm, then 40 ppm: half-way in the first 100 s the offset may be 30 ppm × 50 s off.

    Less what the meetings' own errors explain: twice (10 + 10) µs in 100 s, which is 0.4 ppm.
    """
    offsets = compare([5000, 6000, 10_000])
    _, error, _ = at(offsets, 150, 150, 5500)
    assert error == pytest.approx(10 + 50e6 * (30e-6 - 0.4e-6), rel=1e-3)


def test_a_short_stretch_says_little_about_drift_and_spoils_no_other() -> None:
    """Two meetings 1 s apart that differ by their errors: no drift of 20 ppm is believed."""
    theirs = [meeting(100, 100 * S), meeting(110, 101 * S), meeting(200, 201 * S)]
    mine = [
        meeting(100, 100 * S, 10 * US),
        meeting(110, 101 * S + 20 * US, 10 * US),
        meeting(200, 201 * S + 20 * US, 10 * US),
    ]
    offsets = compare_rounds(mine, theirs)
    assert offsets is not None
    assert at(offsets, 151, 150)[1] == pytest.approx(10 + 50e6 * WANDER)
    assert at(offsets, 50, 50)[1] == pytest.approx(10 + 50e6 * KEPT_DRIFT)  # before the first


def test_after_the_last_meeting_the_drift_goes_on() -> None:
    """50 s after it: ±10 µs, and (2 + 0.2) ppm of 50 s."""
    offsets = compare([5000, 6000])
    offset, error, known = at(offsets, 250, 250, 6500)
    assert offset == pytest.approx(6500, abs=0.1)
    assert error == pytest.approx(10 + 50e6 * (WANDER + 0.2e-6), rel=1e-3)
    assert known


@pytest.mark.parametrize(("kept", "drift"), [(True, KEPT_DRIFT), (False, MAX_DRIFT)])
def test_one_meeting_says_nothing_about_drift(kept: bool, drift: float) -> None:
    offset, error, _ = at(compare([5000], kept=kept), 160, 150, 5000)
    assert (offset, error) == (pytest.approx(5000), pytest.approx(10 + 60e6 * drift, rel=1e-3))


@pytest.mark.parametrize("by_us", [3_000_000, -3_000_000, -400_000_000])
def test_a_clock_that_is_set_is_unknown_there_and_known_elsewhere(by_us: int) -> None:
    offsets = compare([0, 0, by_us, by_us])
    assert offsets.was_set.tolist() == [False, True, False]
    assert offsets.mean_drift == pytest.approx(0, abs=1e-9)
    assert not at(offsets, 250, 250)[2]
    assert at(offsets, 150, 150)[2]
    offset, _, known = at(offsets, 350, 350, by_us)
    assert (offset, known) == (pytest.approx(by_us), True)


def test_a_drift_of_200_ppm_is_no_setting() -> None:
    assert not compare([0, 19_000]).was_set.any()  # 190 ppm
    assert compare([0, 21_000]).was_set.all()


@pytest.mark.parametrize("is_own", [True, False])
def test_the_counter_that_nobody_sets_tells_whose_clock_it_was(is_own: bool) -> None:
    """A step of 5 ms in 100 s is less than a quartz may drift, and is noticed all the same."""
    set_us, steady = [0, 0, 5000], [7, 7, 7]
    mine_perf = [7 + us * US for us in set_us] if is_own else steady
    their_perf = steady if is_own else [7 - us * US for us in set_us]
    mine, theirs = (
        [
            meeting(100 * n, n * 100 * S + offset * US, 10 * US, perf)
            for n, (offset, perf) in enumerate(zip(offsets, perfs, strict=True), 1)
        ]
        for offsets, perfs in ((set_us, mine_perf), ([0, 0, 0], their_perf))
    )
    offsets = compare_rounds(mine, theirs)
    assert offsets is not None
    assert offsets.was_set.tolist() == [False, True]
    assert bool(offsets.is_own[1]) is is_own


def test_meetings_that_contradict_themselves_or_differ_are_left_out() -> None:
    """A clock set amid the rounds, and a meeting of which one rank has fewer rounds."""
    theirs = [meeting(100, 100 * S), meeting(200, 200 * S)]
    torn = meeting(100, 100 * S, 10 * US)
    torn = Rounds(
        label="run",
        step=100,
        came_ns=torn.came_ns + np.array([0, 0, S]),
        left_ns=torn.left_ns + np.array([0, 0, S]),
    )
    short = meeting(200, 200 * S, 10 * US)
    short = Rounds(label="run", step=200, came_ns=short.came_ns[:2], left_ns=short.left_ns[:2])
    assert compare_rounds([torn, short], theirs) is None
    assert compare_rounds([], theirs) is None


def test_the_true_offset_stays_within_the_error_over_hours() -> None:
    """A drift that wanders by 1.5 ppm, meetings every 5 minutes, round trips of up to 200 µs."""
    rng = np.random.default_rng(17)
    seconds = np.arange(0, 6 * 3600)
    drift = 12e-6 + 1.5e-6 * np.sin(seconds / 1700)
    true = np.cumsum(drift) * S
    met = np.arange(0, len(seconds), 300)
    early, late = (rng.integers(5 * US, 200 * US, len(met)) for _ in range(2))
    theirs = [meeting(int(second), int(second) * S) for second in met]
    mine = []
    for second, before, after in zip(met, early, late, strict=True):
        at_ns = np.array([EPOCH + int(second) * S + int(true[second])] * 3)
        rounds = Rounds(
            label="run", step=int(second), came_ns=at_ns - before, left_ns=at_ns + after
        )
        mine.append(rounds)
    exact = [
        Rounds(
            label="run",
            step=r.step,
            came_ns=r.came_ns[:1].repeat(3),
            left_ns=r.came_ns[:1].repeat(3),
        )
        for r in theirs
    ]
    offsets = compare_rounds(mine, exact)
    assert offsets is not None
    local = EPOCH + seconds * S + true.astype(np.int64)
    offset, error, known = offset_at(offsets, local, seconds)
    assert known.all()
    assert (np.abs(offset - true) <= error + 1).all()
    assert error.max() < 1_000_000  # never worse than 1 ms
    assert offsets.mean_drift == pytest.approx(12e-6, rel=0.1)
