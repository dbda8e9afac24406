"""Clocks are tied within their bounds, and nobody waits long for a rank that does not come."""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from two_ranks import run_ranks

from clock_bounds import offset_bounds
from stepscope.measure.cluster import clock_sync as clock_module
from stepscope.measure.cluster.clock_sync import ClockSync, choose_interval_s, scheduled_meeting

if TYPE_CHECKING:
    from pathlib import Path

OFFSET_NS = 5_000_000
FRESH = "from stepscope.measure.cluster.clock_sync import ClockSync\n"


@given(
    offset=st.integers(-(10**9), 10**9),
    seed=st.integers(0, 1000),
    count=st.integers(1, 30),
)
def test_the_true_offset_is_always_within_the_bounds(offset: int, seed: int, count: int) -> None:
    draw = random.Random(seed)
    rounds_a, rounds_b, clock = [], [], 0
    for _ in range(count):
        came_a, came_b = clock + draw.randrange(1000), clock + draw.randrange(1000)
        full = max(came_a, came_b)
        left_a, left_b = full + draw.randrange(500), full + draw.randrange(500)
        rounds_a.append((came_a, left_a))
        rounds_b.append((came_b + offset, left_b + offset))
        clock = max(left_a, left_b)
    bounds = offset_bounds(rounds_a, rounds_b)
    assert bounds is not None
    assert bounds[0] <= offset <= bounds[1]


def test_rounds_that_contradict_each_other_give_no_bounds() -> None:
    assert offset_bounds([(0, 10), (100, 110)], [(0, 10), (200, 210)]) is None
    assert offset_bounds([], []) is None


def test_without_a_process_group_nothing_happens() -> None:
    clock = ClockSync()
    assert clock.synchronise("start", 0) is None
    content = clock.content()
    assert content.pop("host_clock")["host"] == os.uname().nodename
    assert content == {"schema": 1, "rank": 0, "world_size": 1, "syncs": [], "notes": []}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Two syncs over a TCP store, rank 1's clock 5 ms ahead, groups of the script's own around."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    body = f"""
    import threading
    ahead = {OFFSET_NS} * rank
    clock = ClockSync(now=lambda: time.time_ns() + ahead)
    random_state = torch.random.get_rng_state()
    files = len(os.listdir("/proc/self/fd"))
    clock.synchronise("start", 3)
    ours = dist.new_group([0, 1])
    clock.synchronise("end", 6)
    total = torch.ones(1)
    dist.all_reduce(total, group=ours)
    dist.all_reduce(total)
    answer = clock.content()
    answer["total"] = total.item()
    answer["group"] = ours.group_name
    answer["random_untouched"] = torch.equal(random_state, torch.random.get_rng_state())
    answer["threads"] = [thread.name for thread in threading.enumerate()]
    """
    folder = tmp_path_factory.mktemp("tied")
    return run_ranks(folder, body, before=FRESH, method=f"tcp://127.0.0.1:{port}")


def test_an_offset_is_recovered_within_its_bounds(tied: list[Any]) -> None:
    for a, b in zip(tied[0]["syncs"], tied[1]["syncs"], strict=True):
        low, high = offset_bounds(a["rounds"], b["rounds"])
        assert low <= OFFSET_NS <= high
        assert high - low < 1_000_000


def test_the_result_is_what_clock_json_promises(tied: list[Any]) -> None:
    for rank, answer in enumerate(tied):
        assert (answer["schema"], answer["rank"], answer["world_size"]) == (1, rank, 2)
        assert [(sync["label"], sync["step"]) for sync in answer["syncs"]] == [
            ("start", 3),
            ("end", 6),
        ]
        for sync in answer["syncs"]:
            assert sync["clock"] == "unix_ns"
            assert len(sync["rounds"]) == 50
            assert all(before <= after for before, after in sync["rounds"])
            assert abs(sync["offset_perf_to_unix_ns"]) > 0
        assert answer["notes"] == []


def test_the_script_finds_everything_as_without_us(tied: list[Any]) -> None:
    for answer in tied:
        assert answer["total"] == 4
        assert answer["group"] == "1"  # the first group the script makes
        assert answer["random_untouched"]
        assert answer["threads"] == ["MainThread"]
        assert answer["output"] == []


def test_a_rank_that_never_comes_costs_no_more_than_the_timeout(tmp_path: Path) -> None:
    body = """
    clock = ClockSync(timeout_s=1.0)
    answer["seconds"] = []
    def sync(label, step):
        began = time.monotonic()
        assert clock.synchronise(label, step) is None
        answer["seconds"].append(time.monotonic() - began)
    if rank == 1:
        sync("start", 0)
    dist.barrier()
    if rank == 0:
        sync("start", 0)  # rank 1 has left
        sync("end", 1)
    dist.barrier()
    if rank == 1:
        sync("end", 1)  # rank 0 has left
    sync("start", 2)  # both gave up
    total = torch.ones(1)
    dist.all_reduce(total)
    answer["total"], answer["notes"] = total.item(), clock.content()["notes"]
    """
    zero, one = run_ranks(tmp_path, body, before=FRESH)
    assert zero["total"] == one["total"] == 2
    assert zero["seconds"][0] < 0.5
    assert zero["seconds"][1] < 2
    assert one["seconds"][0] < 2
    assert one["seconds"][1] < 0.5
    assert max(zero["seconds"][2], one["seconds"][2]) < 0.05
    assert "did not connect in time; stepscope does not try again" in zero["notes"][-1]
    assert "does not try again" in one["notes"][-1]


def test_ranks_at_different_steps_do_not_meet(tmp_path: Path) -> None:
    body = """
    clock = ClockSync(timeout_s=0.5)
    began = time.monotonic()
    answer["sync"] = clock.synchronise("start", rank)
    answer["seconds"] = time.monotonic() - began
    """
    for answer in run_ranks(tmp_path, body, before=FRESH):
        assert answer["sync"] is None
        assert answer["seconds"] < 1.5


def test_a_rank_that_dies_between_rounds_hangs_nobody(tmp_path: Path) -> None:
    body = """
    calls = 0
    def now():
        global calls
        calls += 1
        if rank == 1 and calls > 20:
            os._exit(9)
        return time.time_ns()
    clock = ClockSync(now=now, timeout_s=2.0)
    began = time.monotonic()
    answer["sync"] = clock.synchronise("start", 0)
    answer["seconds"] = time.monotonic() - began
    answer["notes"] = clock.content()["notes"]
    """
    zero, one = run_ranks(tmp_path, body, before=FRESH)
    assert one is None
    assert zero["sync"] is None
    assert zero["seconds"] < 3
    assert zero["notes"][0].startswith("comparing clocks failed")


def test_a_store_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        def check(self, _: list[str]) -> bool:
            time.sleep(3)
            return False

    clock = ClockSync(timeout_s=0.2)
    clock._rank, clock._world = 0, 2
    monkeypatch.setattr(clock, "_store", Stuck)
    began = time.monotonic()
    assert clock.synchronise("start", 0) is None
    assert time.monotonic() - began < 1.5
    assert "did not answer" in clock.content()["notes"][0]
    assert clock.synchronise("end", 1) is None


# When they meet


@pytest.mark.parametrize(
    ("step", "meeting"), [(0, 100), (100, 100), (101, 200), (201, 500), (501, 1000), (6000, 10_000)]
)
def test_meetings_that_all_ranks_know(step: int, meeting: int) -> None:
    assert scheduled_meeting(step) == meeting


def test_meetings_take_a_thousandth_of_the_time_at_most() -> None:
    assert choose_interval_s(elapsed_s=600, cost_s=0.01) == 60
    assert choose_interval_s(elapsed_s=600, cost_s=0.2) == 200
    assert choose_interval_s(elapsed_s=32 * 600, cost_s=0.2) == 600
    elapsed, meetings = 0.0, 0
    while elapsed < 30 * 86_400:
        elapsed += choose_interval_s(elapsed, 0.02)
        meetings += 1
    assert meetings < 300  # in a month


def test_rank_0_announces_the_next_meeting_by_the_pace_of_the_steps() -> None:
    """1000 steps in 250 s, meetings of 20 ms: the next one is 60 s, or 240 steps, later."""
    seconds = iter([0.0, 50.0, 50.02, 300.0, 300.02])
    pace = clock_module._Pace(now=lambda: next(seconds))
    pace.meeting_begins(100)
    pace.meeting_ends()
    pace.meeting_begins(1100)
    assert pace.next_step() == 1100 + 240


def test_all_ranks_get_the_same_next_meeting(tmp_path: Path) -> None:
    body = """
    os.environ.update(LOCAL_WORLD_SIZE="1", WORLD_SIZE="2")
    clock = ClockSync()
    answer["meetings"] = [clock.next_meeting(1)]
    clock.synchronise("run", 100)
    answer["meetings"].append(clock.next_meeting(101))
    """
    zero, one = run_ranks(tmp_path, body, before=FRESH)
    assert zero["meetings"] == one["meetings"]
    assert zero["meetings"][0] == 100
    assert zero["meetings"][1] > 150


def test_a_job_of_80_ranks_meets_by_host(tmp_path: Path) -> None:
    """Two processes that say they are all of a large job, on two hosts of 40 ranks."""
    body = """
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="40", WORLD_SIZE="80")
    dist.get_world_size = lambda: 80
    clock = ClockSync()
    answer["rounds"] = len(clock.synchronise("start", 1)["rounds"])
    os.environ.update(LOCAL_RANK="1")
    other = ClockSync()
    other._rank = 5
    dist.get_rank = lambda: 5
    answer["others"] = other.synchronise("start", 1), other.entries, other.next_meeting(3)
    """
    for answer in run_ranks(tmp_path, body, before=FRESH):
        assert answer["rounds"] == 50
        assert answer["others"] == [None, 0, sys.maxsize]
