"""Every schedule, proven with symbols; and that the proof notices what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proof import prove

from stepscope.errors import UsageError
from stepscope.measure.calibrate.collective_algorithms import plan_rank
from stepscope.records.collective_schedules import (
    ALGORITHMS,
    COLLECTIVES,
    CollectiveSchedule,
    Transfer,
    WrongScheduleError,
    build_probes,
    build_schedule,
    chunk_bounds,
    runs,
    simulate,
    square_groups,
)

ALL = list(product(ALGORITHMS, COLLECTIVES))


@pytest.mark.parametrize(("algorithm", "kind"), ALL)
def test_every_rank_ends_with_the_sum_of_all_each_counted_once(algorithm: str, kind: str) -> None:
    for ranks in range(1, 17):
        prove(build_schedule(algorithm, kind, ranks))


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), seed=st.randoms())
def test_hosts_with_any_number_of_ranks_in_any_order(sizes: list[int], seed: object) -> None:
    ranks = list(range(sum(sizes)))
    seed.shuffle(ranks)  # type: ignore[attr-defined]
    taken = iter(ranks)
    groups = [[next(taken) for _ in range(size)] for size in sizes]
    for kind in COLLECTIVES:
        prove(build_schedule("hierarchical", kind, len(ranks), groups))


def test_the_ring_of_three_is_the_one_in_the_textbook() -> None:
    reduce, gather = (build_schedule("ring", "all_reduce", 3).steps[at] for at in (0, 2))
    assert {(one.source, one.target) for one in reduce} == {(0, 1), (1, 2), (2, 0)}
    assert all(one.adds and len(one.chunks) == 1 for one in reduce)
    assert {(one.source, one.target, one.chunks) for one in gather} == {
        (0, 1, (0,)), (1, 2, (1,)), (2, 0, (2,)),
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16])
def test_steps_are_as_many_as_the_textbook_says(ranks: int) -> None:
    up, exact = math.ceil(math.log2(ranks)), math.log2(ranks).is_integer()
    fold = 0 if exact else 2
    down = int(math.log2(ranks))
    steps = {name: len(build_schedule(name, "all_reduce", ranks).steps) for name in ALGORITHMS}
    size = len(square_groups(ranks)[0])
    assert steps == {
        "ring": 2 * (ranks - 1),
        "binomial_tree": 2 * up,
        "halving_doubling": 2 * down + fold,
        "recursive_doubling": down + fold,
        "bruck": 2 * up,
        "direct": 2,
        "hierarchical": 2 * (size - 1) + 2 * (ranks // size - 1),
    }


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_a_probe_posts_its_receives_a_step_early(ranks: int) -> None:
    """As the algorithms do: otherwise its steps would cost a round trip more."""
    for probe in build_probes(ranks, [range(ranks)]):
        for rank in range(ranks):
            arrivals = plan_rank(probe.schedule, rank, 8 * probe.schedule.chunks).arrivals
            for step, arriving in enumerate(arrivals):
                assert all(one.post_at == max(0, step - 1) for one in arriving)
                assert all(one.elements == 8 for one in arriving)


def wrong(**changes: object) -> CollectiveSchedule:
    return replace(build_schedule("ring", "all_reduce", 3), **changes)  # type: ignore[arg-type]


def test_a_contribution_counted_twice_is_noticed() -> None:
    first = build_schedule("ring", "all_reduce", 3).steps[0]
    with pytest.raises(WrongScheduleError, match=r"step 1: rank \d would count \[\d\] twice"):
        prove(wrong(steps=(first, first)))


def test_a_missing_step_is_noticed() -> None:
    steps = build_schedule("ring", "all_reduce", 3).steps
    with pytest.raises(WrongScheduleError, match=r"ends with \[\d, \d\]|ends with \[\d\]"):
        prove(wrong(steps=steps[:2]))


def test_a_copy_that_loses_a_contribution_is_noticed() -> None:
    with pytest.raises(WrongScheduleError, match=r"rank 1 would lose \[1\] in chunk 0"):
        prove(wrong(steps=((Transfer(0, 1, (0,)),),)))


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ((Transfer(0, 0, (0,), adds=True),), "sends to itself"),
        ((Transfer(0, 1, (0,), adds=True), Transfer(0, 1, (1,), adds=True)), "two messages"),
        ((Transfer(0, 1, (0,), adds=True), Transfer(2, 1, (0,))), "written again"),
    ],
)
def test_a_step_that_cannot_be_run_is_refused(step: tuple[Transfer, ...], reason: str) -> None:
    with pytest.raises(WrongScheduleError, match=reason):
        prove(wrong(steps=(step,)))


def test_a_rank_cannot_send_what_it_does_not_have() -> None:
    gather = build_schedule("ring", "all_gather", 3)
    with pytest.raises(WrongScheduleError, match="has no chunk 1 to send"):
        prove(replace(gather, steps=((Transfer(0, 1, (1,)),),)))


def test_partial_sums_grow_along_the_ring() -> None:
    held = list(simulate(build_schedule("ring", "all_reduce", 4)))
    assert [max(len(chunk) for rank in step for chunk in rank) for step in held[:4]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("algorithm", "kind", "ranks", "groups", "reason"),
    [
        ("star", "all_reduce", 4, None, "no algorithm 'star'"),
        ("ring", "broadcast", 4, None, "no schedule for 'broadcast'"),
        ("ring", "all_reduce", 0, None, "1 to 4096 ranks, not 0"),
        ("hierarchical", "all_reduce", 4, [[0, 1], [2]], "each of 4 ranks once"),
        ("hierarchical", "all_reduce", 2, [[0, 1], []], "each of 2 ranks once"),
    ],
)
def test_what_cannot_be_built_is_said(
    algorithm: str, kind: str, ranks: int, groups: list[list[int]] | None, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        build_schedule(algorithm, kind, ranks, groups)


def test_chunks_cover_every_element_once() -> None:
    assert chunk_bounds(10, 4) == [0, 2, 5, 7, 10]
    assert chunk_bounds(0, 3) == [0, 0, 0, 0]
    assert runs((0, 1, 4, 6, 7)) == [(0, 2), (4, 5), (6, 8)]


@pytest.mark.parametrize(("algorithm", "kind"), ALL)
def test_no_early_receive_overwrites_what_is_still_needed(algorithm: str, kind: str) -> None:
    """In place, nothing between posting and arrival may touch the same elements."""
    for ranks in (2, 3, 5, 8):
        schedule = build_schedule(algorithm, kind, ranks)
        for rank in range(ranks):
            plan = plan_rank(schedule, rank, 37)
            for step, arriving in enumerate(plan.arrivals):
                for one in arriving:
                    assert one.post_at == max(0, step - 1)
                    if not one.in_place:
                        continue
                    while_open = plan.sends[one.post_at : step + 1]
                    used = [span for sends in while_open for sent in sends for span in sent.spans]
                    used += [
                        span
                        for others in plan.arrivals[one.post_at : step + 1]
                        for other in others
                        if other is not one
                        for span in other.spans
                    ]
                    ((start, end),) = one.spans
                    assert all(last <= start or end <= first for first, last in used)
