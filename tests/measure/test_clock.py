"""Clocks are tied within their bounds, and nobody waits long for a rank that does not come."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clock_crowd import Crowd, Store, check_offsets
from hypothesis import given
from hypothesis import strategies as st
from two_ranks import run_ranks

from clock_bounds import offset_bounds
from stepscope.measure.cluster import clock_meeting, clock_sync
from stepscope.measure.cluster import clock_sync as clock_module
from stepscope.measure.cluster.clock_meeting import (
    FAN_OUT,
    Blocked,
    MeetingPlace,
    Missed,
    find_place,
    local_place,
)
from stepscope.measure.cluster.clock_sync import (
    ClockSync,
    choose_interval_s,
    host_clock_facts,
    scheduled_meeting,
)

OFFSET_NS = 5_000_000
FRESH = "from stepscope.measure.cluster.clock_sync import ClockSync\n"


@given(offset=st.integers(-(10**9), 10**9), seed=st.integers(0, 1000), count=st.integers(1, 30))
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


# Ranks meet through a store and over sockets; strangers and firewalls cost them little.


def test_clocks_three_seconds_apart_and_the_next_meeting() -> None:
    crowd = Crowd(Store(), 3).all_meet()
    assert [crowd.held[n].next_step for n in range(3)] == [700, 700, 700]
    assert [crowd.held[n].blocked for n in range(3)] == [None, None, None]
    check_offsets(crowd)


def test_many_hosts_meet_in_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two connections each, 12 hosts are four levels deep."""
    monkeypatch.setattr("stepscope.measure.cluster.clock_meeting.FAN_OUT", 2)
    crowd = Crowd(Store(), 12, timeout_s=20).all_meet()
    assert crowd.problems == {}
    assert {held.next_step for held in crowd.held.values()} == {700}
    check_offsets(crowd)


def test_in_a_tree_a_missing_rank_is_missed_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.measure.cluster.clock_meeting.FAN_OUT", 2)
    crowd = Crowd(Store(), 7, timeout_s=1.0)
    del crowd.threads[6]
    crowd.all_meet()
    assert set(crowd.problems) == set(range(6))
    assert all(isinstance(problem, Missed) for problem in crowd.problems.values())
    assert max(crowd.seconds.values()) < 3


# Firewalls


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port at which a connection gets no answer: its queue is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            knock = stack.enter_context(socket.socket())
            knock.setblocking(False)
            knock.connect_ex(server.getsockname())
        time.sleep(0.05)
        yield server.getsockname()[1]


class WrongPort(Store):
    """Everybody is sent to another port than the one that is open."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def set(self, key: str, value: str) -> None:
        if "/where/" in key:
            hosts = {"hosts": ["127.0.0.1"], "port": self._port}
            value = json.dumps({**json.loads(value), **hosts})
        super().set(key, value)


def test_a_blocked_port_costs_a_second_once_and_the_store_takes_over() -> None:
    with silent_port() as port:
        store = WrongPort(port)
        first = Crowd(store, 3).all_meet()
        assert first.problems == {}
        assert max(first.seconds.values()) < 2.5
        for held in first.held.values():
            assert "could not connect to" in held.blocked
            assert held.next_step == 700
        check_offsets(first)
        second = Crowd(store, 3, key="job/b").all_meet()
    assert max(second.seconds.values()) < 0.9  # nobody tries to connect
    assert len(second.held) == 3
    check_offsets(second)


def test_a_port_that_answers_and_says_nothing_is_blocked_too() -> None:
    """As behind a proxy: the connection is made, nobody reads it."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        crowd = Crowd(WrongPort(server.getsockname()[1]), 2).all_meet()
    assert max(crowd.seconds.values()) < 2.5
    assert all(held.blocked for held in crowd.held.values())
    check_offsets(crowd)


def test_a_stranger_that_answers_in_place_of_rank_0_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            peer, _ = server.accept()
            peer.sendall(b"w" * 16)
            peer.close()

        greeter = threading.Thread(target=greet)
        greeter.start()
        crowd = Crowd(WrongPort(server.getsockname()[1]), 2).all_meet()
        greeter.join()
    assert all("another program answered" in held.blocked for held in crowd.held.values())


def test_many_hosts_do_not_crowd_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_meeting, "MOST_THROUGH_STORE", 2)
    with silent_port() as port:
        crowd = Crowd(WrongPort(port), 3).all_meet()
    assert all(isinstance(problem, Blocked) for problem in crowd.problems.values())
    assert len(crowd.problems) == 3


def test_a_rank_that_is_gone_blocks_nothing() -> None:
    """Rank 0 left and closed its port: no firewall is blamed, and sockets are used again."""
    store = Store()
    Crowd(store, 2, timeout_s=0.2).meet(0)
    late = Crowd(store, 2, timeout_s=0.2)
    late.meet(1)
    assert isinstance(late.problems[1], Missed)
    again = Crowd(store, 2, key="job/b").all_meet()
    assert again.held[1].blocked is None


def test_an_address_that_never_answers_does_not_keep_the_next_from_being_tried() -> None:
    with silent_port() as silent, socket.create_server(("127.0.0.1", 0)) as server:
        targets = {"one": ("127.0.0.1", silent), "two": server.getsockname()}
        asked = []

        def resolve(host: str, _: int) -> list[tuple[int, tuple[str, int]]]:
            asked.append(host)
            return [(socket.AF_INET, targets[host])]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock_meeting, "_resolve", resolve)
            for hosts in (["one", "two"], ["two", "one"]):
                where = {"hosts": hosts, "host": "elsewhere", "port": 1}
                with clock_meeting.connect_any(where, time.monotonic() + 5) as peer:
                    assert peer.getpeername() == server.getsockname()
    assert asked == ["one", "two", "two"]  # a name is looked up only when it is needed


# Strangers


def _says(hello: bytes, *, then_wait: bool = True) -> Callable[[int, bytes], socket.socket]:
    def knock(port: int, token: bytes) -> socket.socket:
        peer = socket.create_connection(("127.0.0.1", port))
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.send(hello.replace(b"TOKEN", token))
        if not then_wait:
            peer.close()
        return peer

    return knock


def _proves(number: int) -> Callable[[int, bytes], socket.socket]:
    def knock(port: int, token: bytes) -> socket.socket:
        proof = clock_meeting._proof(token, b"hello", number)
        return _says(clock_meeting._HELLO.pack(proof, number))(port, token)

    return knock


def _closes_one_side(port: int, token: bytes) -> socket.socket:
    peer = _says(b"")(port, token)
    peer.shutdown(socket.SHUT_WR)
    return peer


def _resets(port: int, token: bytes) -> socket.socket:
    peer = _says(b"garbage")(port, token)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.close()
    return peer


STRANGERS = {
    "says nothing": _says(b""),
    "leaves at once": _says(b"", then_wait=False),
    "closes one side": _closes_one_side,
    "resets the connection": _resets,
    "says a little": _says(b"hello"),
    "knows no token": _says(b"x" * 16 + b"\0\0\0\1"),
    "sends the token itself": _says(b"TOKEN\0\0\0\1"),
    "sends megabytes": _says(b"GET / HTTP/1.1\r\n" * 500_000),
    "is a rank that does not exist": _proves(9),
    "is rank 0 itself": _proves(0),
}


def meet_among(strangers: Callable[[int, bytes], list[socket.socket]], timeout_s: float) -> Crowd:
    """Rank 0 waits; strangers come first, then rank 1."""
    store = Store()
    crowd = Crowd(store, 2, timeout_s)
    crowd.threads[0].start()
    while not store.check(["job/a/where/0"]):
        time.sleep(0.001)
    where = json.loads(store.get("job/a/where/0"))
    peers = strangers(where["port"], bytes.fromhex(where["token"]))
    time.sleep(0.05)
    began = time.monotonic()
    crowd.meet(1)
    crowd.threads[0].join()
    assert time.monotonic() - began < timeout_s / 2
    for peer in peers:
        peer.close()
    return crowd


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_at_the_door_costs_nothing(stranger: str) -> None:
    """Twenty of them come first; the rank that knows the token is let in and nobody else."""
    knock = STRANGERS[stranger]
    crowd = meet_among(lambda port, token: [knock(port, token) for _ in range(20)], 10.0)
    assert [len(crowd.held[n].marks) for n in range(2)] == [5, 5]
    assert crowd.held[1].blocked is None
    check_offsets(crowd)


def test_a_flood_of_strangers_is_thrown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_meeting, "_MOST_STRANGERS", 16)

    def flood(port: int, token: bytes) -> list[socket.socket]:
        return [_says(b"")(port, token) for _ in range(100)]

    crowd = meet_among(flood, 10.0)
    check_offsets(crowd)
    assert crowd.held[1].blocked is None


def test_strangers_alone_are_no_ranks() -> None:
    store = Store()
    crowd = Crowd(store, 2, timeout_s=0.5)
    crowd.meet(0)
    assert "1 ranks did not connect" in str(crowd.problems[0])
    where = json.loads(store.get("job/a/where/0"))
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", where["port"]))


# Who meets: all ranks of a small job, one rank per host of a large one.


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


# What the kernel says about the host's clock is read, and nothing is set.


def test_this_host() -> None:
    facts = host_clock_facts()
    assert facts["host"] == os.uname().nodename
    assert facts["synchronised"] in (True, False, None)
    if not facts["synchronised"]:
        assert facts["estimated_error_ns"] is facts["maximum_error_ns"] is None


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        (0, 0x2001, (True, 12_000, 900_000)),
        (0, 0x0041, (False, None, None)),  # STA_UNSYNC
        (5, 0x0001, (False, None, None)),  # TIME_ERROR
    ],
)
def test_the_kernels_flags(state: int, status: int, expected: tuple[Any, ...]) -> None:
    facts = clock_sync._kernel_facts(state, status, 12, 900)
    assert tuple(facts.values()) == expected


def test_a_system_without_the_call_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(clock_sync.ctypes, "CDLL", refuse)
    facts = host_clock_facts()
    assert facts["synchronised"] is facts["estimated_error_ns"] is None


def test_ptp_devices_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ptp1", "ptp0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(clock_sync, "_PTP", tmp_path)
    assert host_clock_facts()["ptp_devices"] == ["ptp0", "ptp1"]
    monkeypatch.setattr(clock_sync, "_PTP", tmp_path / "none")
    assert host_clock_facts()["ptp_devices"] == []
