"""Who meets: all ranks of a small job, one rank per host of a large one."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from clock_crowd import Store

from stepscope.measure.cluster import clock_meeting
from stepscope.measure.cluster.clock_meeting import (
    FAN_OUT,
    MeetingPlace,
    Missed,
    find_place,
    local_place,
)


def test_small_jobs_meet_without_asking_anybody() -> None:
    assert find_place(None, "job", 3, 64, 0.0) == MeetingPlace(3, 64)


def test_a_tree_of_1250_hosts_is_two_levels_deep_and_complete() -> None:
    places = [MeetingPlace(number, 1250) for number in range(1250)]
    children = [child for place in places for child in place.children]
    assert sorted(children) == list(range(1, 1250))  # everybody has one parent
    assert max(len(place.children) for place in places) == FAN_OUT
    assert all(number in places[places[number].parent].children for number in range(1, 1250))
    depth = [0] * 1250
    for number in range(1, 1250):
        depth[number] = depth[places[number].parent] + 1
    assert max(depth) == 2


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "80"}, (3, 8)),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "40"}, None),  # another group
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "80"}, None),
        ({"LOCAL_RANK": "3", "WORLD_SIZE": "80"}, None),
        ({"LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "80"}, None),
        ({}, None),
    ],
)
def test_the_launcher_may_say_where_a_rank_is(variables: dict[str, str], place: Any) -> None:
    assert local_place(80, variables) == place


def sign_up(monkeypatch: pytest.MonkeyPatch, ranks: range, locals_: Any, hosts: Any) -> list[Any]:
    """All ranks of a job of 80 at once."""
    here = threading.local()
    monkeypatch.setattr(clock_meeting, "local_place", lambda _: locals_(here.rank))
    monkeypatch.setattr(clock_meeting, "_this_host", lambda: hosts(here.rank))
    store, places = Store(), [None] * 80

    def work(rank: int) -> None:
        here.rank = rank
        try:
            places[rank] = find_place(store, "job", rank, 80, time.monotonic() + 2)
        except Missed as reason:
            places[rank] = str(reason)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return places


def test_local_rank_0_stands_for_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    places = sign_up(monkeypatch, range(80), lambda rank: (rank % 8, 8), None)
    meeting = [rank for rank in range(80) if places[rank] is not None]
    assert meeting == list(range(0, 80, 8))
    assert places[0] == MeetingPlace(0, 10)
    assert sorted(places[rank].number for rank in meeting) == list(range(10))
    assert {places[rank].size for rank in meeting} == {10}


def test_hosts_with_different_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 and 32."""
    where = lambda rank: (rank, 48) if rank < 48 else (rank - 48, 32)  # noqa: E731
    places = sign_up(monkeypatch, range(80), where, None)
    assert (places[0], places[48]) == (MeetingPlace(0, 2), MeetingPlace(1, 2))
    assert sum(place is not None for place in places) == 2


def test_where_nobody_says_the_first_of_a_host_stands_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = sign_up(monkeypatch, range(80), lambda _: None, lambda rank: f"host{rank % 4}")
    meeting = [rank for rank in range(80) if places[rank] is not None]
    assert 0 in meeting
    assert {rank % 4 for rank in meeting} == {0, 1, 2, 3}
    assert len(meeting) in (4, 5)  # rank 0 meets even if another of its host was first
    assert sorted(places[rank].number for rank in meeting) == list(range(len(meeting)))


def test_a_rank_that_never_signs_up_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    places = sign_up(monkeypatch, range(72), lambda rank: (rank % 8, 8), None)
    assert places[0] == "only 72 of 80 ranks registered in time"
    assert places[8] == "not all ranks of the job registered in time"
