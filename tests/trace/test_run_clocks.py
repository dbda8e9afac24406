"""Hosts' clocks over a run: rounds of the rank that met for its host, and what they say."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from explain.whole_run.calls import BEGAN_NS, STEP_NS, part_of, run_of
from stepscope.explain.job.hosts import about_hosts, clock_notes
from stepscope.explain.job.late_ranks import judge_whole_run
from stepscope.records.job import Clock, ClockKeeping, ClockSet, RankPart, Rounds
from stepscope.trace.clock_offsets import align_runs, describe_hosts, share_clock, share_rounds
from stepscope.ui.topics.distributed import clock_words, host_clock_words

MS, US = 1_000_000, 1_000
STEPS = 400
NOT_KEPT = ClockKeeping(synchronised=False)


def meetings(steps: list[int], ahead_ns: list[int], half_ns: int = 0) -> tuple[Rounds, ...]:
    """Just before these steps, on a clock that is ahead by this much."""
    out = []
    for step, ahead in zip(steps, ahead_ns, strict=True):
        at = np.full(3, BEGAN_NS + step * STEP_NS - MS + ahead)
        rounds = Rounds(label="run", step=step, came_ns=at - half_ns, left_ns=at + half_ns)
        out.append(rounds)
    return tuple(out)


def two_hosts(ahead_ns: list[int], late_ms: float = 0.0, **changes: Any) -> list[RankPart]:
    """Ranks 0 and 1 on node0, 2 and 3 on node1, whose clock is ahead at steps 0, 100, ...; only
    the first rank of each host met, and rank 3 is late."""
    steps = [100 * n for n in range(len(ahead_ns))]
    numbers = np.arange(STEPS)
    ahead = np.interp(numbers, steps, ahead_ns)
    for n, (before, after) in enumerate(itertools.pairwise(ahead_ns)):
        if abs(after - before) > 2 * MS:  # set in the middle, not drifted
            stretch = slice(100 * n, 100 * (n + 1))
            ahead[stretch] = np.where(numbers[stretch] < 100 * n + 50, before, after)
    noise = np.random.default_rng(0).normal(0, 0.1 * MS, (4, STEPS))
    runs = [run_of(noise[rank] + (late_ms * MS if rank == 3 else 0), first=0) for rank in range(4)]
    parts = [part_of(rank, run, host=f"node{rank // 2}") for rank, run in enumerate(runs)]
    for rank in (2, 3):
        arrival = runs[rank].arrival_ns + np.rint(ahead).astype(np.int64)
        parts[rank] = replace(parts[rank], run=replace(runs[rank], arrival_ns=arrival))
    parts[0] = replace(parts[0], rounds=meetings(steps, [0] * len(steps)))
    parts[2] = replace(parts[2], rounds=meetings(steps, ahead_ns, 50 * US), **changes)
    return parts


def test_the_rank_that_met_speaks_for_its_host() -> None:
    parts = share_rounds(two_hosts([3_000 * MS] * 4))
    assert parts[1].rounds is parts[0].rounds
    assert parts[3].rounds is parts[2].rounds
    assert share_rounds([part_of(0, None)])[0].rounds == ()


def test_clocks_seconds_apart_are_aligned_and_a_late_rank_is_found() -> None:
    parts = two_hosts([3_000 * MS] * 4, late_ms=6.0)
    aligned = align_runs(parts)
    assert aligned.apart == ()
    assert aligned.error_ns[0] == aligned.error_ns[1] == 0
    # ±50 µs at a meeting. After the last, at step 300, 20 ppm come on top: 95% of the calls are at
    # most 79 steps of 30 ms after it.
    expected = 50 * US + 20e-6 * (79 * STEP_NS + MS)
    assert aligned.error_ns[3] == pytest.approx(expected, rel=0.01)
    lateness = judge_whole_run(parts)
    assert lateness.stragglers is not None
    (rank,) = lateness.stragglers.ranks
    assert rank.rank == 3
    assert rank.excess_ms == pytest.approx(6.0, rel=0.05)
    assert lateness.arrivals is not None
    errors = lateness.arrivals.error_ns
    assert errors[0] == pytest.approx(aligned.error_ns[3])
    assert errors[3] == pytest.approx(2 * aligned.error_ns[3], rel=1e-3)  # rank 2 may be the last


def test_a_clock_that_was_set_costs_the_steps_between_two_meetings_only() -> None:
    parts = two_hosts([0, 0, 5_000 * MS, 5_000 * MS], late_ms=6.0)
    aligned = align_runs(parts)
    assert len(aligned.runs[0]) == STEPS
    assert sorted(set(range(STEPS)) - set(aligned.runs[2].number.tolist())) == list(range(100, 200))
    lateness = judge_whole_run(parts)
    assert lateness.stragglers is not None
    assert [rank.rank for rank in lateness.stragglers.ranks] == [3]
    assert lateness.stragglers.ranks[0].of == 300


def test_hosts_with_one_name_and_two_clocks_do_not_share_one() -> None:
    one, other = (part_of(rank, None, host="localhost") for rank in (0, 1))
    one = replace(one, rounds=meetings([0, 100], [0, 0]))
    other = replace(other, rounds=meetings([0, 100], [3_000 * MS] * 2, 50 * US))
    assert not share_clock(other, one)
    assert share_clock(replace(other, rounds=meetings([0, 100], [20 * US] * 2, 50 * US)), one)
    assert share_clock(replace(other, rounds=()), one)
    assert not share_clock(replace(other, host="node2", rounds=()), one)


def test_hosts_are_described() -> None:
    """60 µs in three times 3 s are 20/3 ppm."""
    drifting = [3_000 * MS + n * 20 * US for n in range(4)]
    keeping = ClockKeeping(synchronised=True, estimated_error_ns=7, maximum_error_ns=9)
    parts = two_hosts(drifting, keeping=keeping)
    clock = Clock(aligned=True, reference=0, at_ns=BEGAN_NS + 200 * STEP_NS)
    first, second = describe_hosts(parts, clock)
    assert (first.host, first.ranks, first.offset_ns, first.meetings) == ("node0", (0, 1), 0, 4)
    assert first.synchronised is None
    assert (second.host, second.ranks, second.meetings) == ("node1", (2, 3), 4)
    assert second.error_ns == 50 * US
    assert second.drift_ppm == pytest.approx(20 / 3, rel=1e-3)
    assert (second.synchronised, second.estimated_error_ns, second.maximum_error_ns) == (True, 7, 9)


def test_without_meetings_the_window_tells_the_offset() -> None:
    parts = [part_of(rank, None, host=f"node{rank}") for rank in (0, 1)]
    clock = Clock(aligned=True, reference=0, offset_ns={0: 0, 1: 5}, error_ns={0: 0, 1: 2})
    _, second = describe_hosts(parts, clock)
    assert (second.offset_ns, second.error_ns, second.drift_ppm) == (5, 2, None)
    assert second.meetings == 0
    _, unknown = describe_hosts(parts, Clock(aligned=False))
    assert unknown.offset_ns is unknown.error_ns is None
    assert describe_hosts([part_of(0, None)], clock) == ()


def note_ids(clock: Clock) -> dict[str, str]:
    return {note.id: note.detail for note in clock_notes(clock)}


@pytest.mark.parametrize("own", [True, False])
def test_whose_clock_was_set_is_said(own: bool) -> None:
    """Each host's own counter tells."""
    parts = two_hosts([0, 0, 5_000 * MS, 5_000 * MS])
    stepped = [0, 0, 5_000 * MS, 5_000 * MS]
    for rank, sign in ((2, 1), (0, -1)):
        perf = [sign * ns for ns in stepped] if own == (rank == 2) else [0] * 4
        rounds = [
            replace(one, perf_to_unix_ns=ns)
            for one, ns in zip(parts[rank].rounds, perf, strict=True)
        ]
        parts[rank] = replace(parts[rank], rounds=tuple(rounds))
    clock = about_hosts(Clock(aligned=True, reference=0), parts)
    setting = ClockSet(after_step=100, before_step=200, by_ns=(1 if own else -1) * 5_000 * MS)
    named, other = ("node1", "node0") if own else ("node0", "node1")
    hosts = {host.host: host for host in clock.hosts}
    assert hosts[named].was_set == (setting,)
    assert hosts[other].was_set == ()
    detail = note_ids(clock)["host-clock-set"]
    way = "forward" if own else "back"
    assert detail.startswith(f"the clock of {named} was set 5.00 s {way} between steps 100 and 200")


def test_a_clock_that_nobody_keeps_is_told_once_it_is_off() -> None:
    parts = two_hosts([3 * MS] * 4, keeping=NOT_KEPT)
    clock = about_hosts(Clock(aligned=True, reference=0), parts)
    expected = "the clock of node1 is not kept by NTP or PTP: it is 3.00 ms ahead"
    assert note_ids(clock)["clock-not-kept"].startswith(expected)
    assert host_clock_words(clock).startswith("T" + expected[1:])
    close = two_hosts([900 * US] * 4, keeping=NOT_KEPT)
    clock = about_hosts(Clock(aligned=True, reference=0), close)
    assert "clock-not-kept" not in note_ids(clock)
    assert host_clock_words(clock) == ""


def test_failed_meetings_are_told_once() -> None:
    parts = [
        replace(part, clock_notes=("node1 could not connect to node0",))
        for part in two_hosts([0] * 4)
    ]
    clock = about_hosts(Clock(aligned=True, reference=0), parts)
    assert clock.notes == ("node1 could not connect to node0",)
    assert note_ids(clock)["clock-meetings"] == "node1 could not connect to node0"
    assert host_clock_words(clock) == "node1 could not connect to node0."


def test_drift_is_told_where_meetings_show_it() -> None:
    parts = two_hosts([n * 60 * US for n in range(4)])
    clock = Clock(aligned=True, reference=0, error_ns={0: 0, 2: 50_000}, detail="from rounds")
    words = clock_words(about_hosts(clock, parts))
    assert "They drift apart over the run, that of node1 by 20.0 ppm (4 meetings)." in words
