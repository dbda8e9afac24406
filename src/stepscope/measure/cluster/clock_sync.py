"""Meetings in which the ranks compare their clocks, and what clock.json says about them and
about the host's own clock.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.measure.cluster.clock_meeting import (
    MOST_HOSTS,
    MOST_THROUGH_STORE,
    Blocked,
    Meeting,
    MeetingPlace,
    MeetingResult,
    Missed,
    find_place,
    is_on_several_hosts,
)
from stepscope.measure.never_raise import never_raise, note
from stepscope.measure.ranks import initialised_groups
from stepscope.measure.writer import started_thread

# They meet before and after every window, and between several hosts all through the run: first at
# steps that all ranks know, then at the step that rank 0 announced in the meeting before. It
# chooses the steps by time, so that meetings take less than `BUDGET` of it.
#
# A rank that is dead, late or at another step costs the others no more than about `timeout_s` to
# meet and as much again for the rounds. A port that nobody answers costs them a second, once. After
# one broken or two missed meetings, none is tried again.

RUN = "run"  # the label of rounds outside windows
FIRST_MEETING = 100  # the step
BUDGET = 0.001  # of the run's time
ROUNDS, RUN_ROUNDS = 50, 20
TIMEOUT_S = 5.0
_FIRST_COST_S = 0.05  # of a meeting, until it is known
_SHORTEST_S = 60.0  # between two meetings
_MEETINGS_PER_DOUBLING = 32  # so that a run of months has hundreds, not thousands
_MISSES = 2
# A key in the store is never used twice, even by several sessions in this process.
_uses: Counter[tuple[str, int | None]] = Counter()
_sessions = itertools.count()


def scheduled_meeting(step: int) -> int:
    """The first of 100, 200, 500, 1,000, 2,000, ... from this step on."""
    power = FIRST_MEETING
    while True:
        for meeting in (power, 2 * power, 5 * power):
            if meeting >= step:
                return meeting
        power *= 10


def choose_interval_s(elapsed_s: float, cost_s: float) -> float:
    """Until the next meeting; drift changes slowly, so an old run is asked less often."""
    return max(_SHORTEST_S, elapsed_s / _MEETINGS_PER_DOUBLING, cost_s / BUDGET)


def _attempt() -> str:
    """A launcher that restarts ranks may keep the store, with the ports of those that failed."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(os.environ.get(name, "") for name in names)


class ClockSync:
    """One rank's side of every synchronisation, and what clock.json will say."""

    def __init__(
        self, *, now: Callable[[], int] = time.time_ns, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._now = now
        self._timeout_s = timeout_s
        self._misses = 0
        self._is_over = False
        self._rank, self._world = 0, 1
        self._place: MeetingPlace | None = None
        self._stage_until = 0.0  # each stage of a meeting has the timeout for itself
        self._prefix = f"stepscope/clock/{_attempt()}/{next(_sessions)}"
        self._syncs: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._pace = _Pace()
        self._announced = 0

    def next_meeting(self, step: int) -> int:
        """The first step, from this one on, at which ranks on several hosts compare clocks."""
        if self._is_over or not is_on_several_hosts():
            return sys.maxsize
        return self._announced if self._announced >= step else scheduled_meeting(step)

    @property
    def entries(self) -> int:
        """Grows whenever clock.json has something new to say."""
        return len(self._syncs) + len(self._notes)

    @never_raise
    def synchronise(
        self, label: str, step: int | None = None, rounds: int | None = None
    ) -> dict[str, Any] | None:
        """Meet the other ranks at this label and step; None when that is not possible.

        Every rank of the default group has to call it with the same labels and steps; the others
        wait for a missing rank no longer than the timeout.
        """
        _uses[label, step] += 1
        store = self._store()
        if self._is_over or store is None:
            return None
        self._pace.meeting_begins(step)
        key = f"{self._prefix}/{label}/{step}/{_uses[label, step]}"
        many = rounds or (RUN_ROUNDS if label == RUN else ROUNDS)
        held = self._meet(lambda: self._hold(store, key, many))
        if held is None:
            return None
        self._announced = held.next_step if label == RUN else self._announced
        self._pace.meeting_ends()

        # What to add to time.perf_counter_ns(), from the least disturbed of five readings.
        def reading() -> tuple[int, int]:
            before = time.perf_counter_ns()
            unix = self._now()
            after = time.perf_counter_ns()
            return after - before, unix - (before + after) // 2

        result = {
            "label": label,
            "step": step,
            "rounds": held.marks,
            "through": "store" if held.blocked else "sockets",
            "clock": "unix_ns",
            "offset_perf_to_unix_ns": min(reading() for _ in range(5))[1],
        }
        self._syncs.append(result)
        return result

    def content(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "rank": self._rank,
            "world_size": self._world,
            "host_clock": host_clock_facts(),
            "syncs": list(self._syncs),
            "notes": list(self._notes),
        }

    def _store(self) -> Any | None:
        """The job's store, or None without other ranks to meet."""
        dist = initialised_groups()
        if dist is None:
            return None
        self._rank, self._world = int(dist.get_rank()), int(dist.get_world_size())
        if self._world < 2 or dist.get_backend() == "fake":
            return None
        store = dist.distributed_c10d._get_default_store()
        if store is None:
            self._give_up("the default process group has no store to exchange addresses through")
        return store

    def _hold(self, store: Any, key: str, rounds: int) -> MeetingResult | None:
        """None for a rank whose host is represented by another one."""
        if self._place is None:
            deadline = time.monotonic() + self._timeout_s
            self._place = find_place(store, self._prefix, self._rank, self._world, deadline)
        if self._place is None:
            self._is_over = True
            return None
        self._next_stage()
        if self._place.size > MOST_HOSTS:
            self._give_up(f"clocks are not compared on more than {MOST_HOSTS} hosts")
            return None
        meeting = Meeting(store, self._prefix, key, self._place, self._timeout_s)
        held = meeting.hold(rounds, self._now, self._pace.next_step(), self._next_stage)
        self._misses = 0
        if held.blocked:
            self._note(f"{held.blocked}: clocks are compared through the job's store")
        return held

    def _next_stage(self) -> None:
        self._stage_until = time.monotonic() + self._timeout_s + 0.5

    def _meet(self, hold: Callable[[], MeetingResult | None]) -> MeetingResult | None:
        """In a thread: a call to a store blocks while another thread holds it, and a name look-up
        blocks as long as the resolver likes."""
        outcome: list[MeetingResult | None] = []
        problem: list[Exception] = []

        def work() -> None:
            try:
                outcome.append(hold())
            except Exception as error:
                problem.append(error)

        self._next_stage()
        thread = started_thread(work, "stepscope-clock")
        if thread is None:
            self._give_up("no thread could be started to compare clocks")
            return None
        while thread.is_alive() and (left_s := self._stage_until - time.monotonic()) > 0:
            thread.join(left_s)
        if problem:
            self._explain(problem[0])
        elif not outcome:
            self._give_up("the job's store did not answer")
        return outcome[0] if outcome else None

    def _explain(self, problem: Exception) -> None:
        if isinstance(problem, Missed):
            reason = str(problem)
            self._misses += 1
            if self._misses >= _MISSES:
                self._give_up(f"{reason}; stepscope does not try again")
            else:
                self._note(reason)
        elif isinstance(problem, Blocked):
            self._give_up(
                f"{problem}. With more than {MOST_THROUGH_STORE} hosts, clocks come from "
                "collectives"
            )
        else:
            self._give_up(f"comparing clocks failed: {type(problem).__name__}: {problem}")

    def _give_up(self, reason: str) -> None:
        self._is_over = True
        self._note(reason)

    def _note(self, reason: str) -> None:
        if reason not in self._notes:
            self._notes.append(reason)
            note("clock", reason)


class _Pace:
    """How fast the training is and what meetings cost, to choose the step of the next one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_s = self._before_s = self._here_s = now()
        self._before = self._here = 0  # steps
        self._cost_s = _FIRST_COST_S

    def meeting_begins(self, step: int | None) -> None:
        if step is not None and step > self._here:
            self._before, self._before_s = self._here, self._here_s
            self._here, self._here_s = step, self._now()

    def meeting_ends(self) -> None:
        self._cost_s = self._now() - self._here_s

    def next_step(self) -> int:
        """By the steps since the meeting before."""
        step_s = (self._here_s - self._before_s) / max(1, self._here - self._before)
        interval_s = choose_interval_s(self._here_s - self._began_s, self._cost_s)
        return self._here + max(FIRST_MEETING // 2, round(interval_s / max(step_s, 1e-6)))


# Whether this host's clock is kept by NTP or PTP, as the kernel says. Nothing is changed.

_UNSYNCHRONISED = 0x0040  # STA_UNSYNC
_CLOCK_ERROR = 5  # TIME_ERROR
_PTP = Path("/sys/class/ptp")


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), as glibc and musl have it on 64-bit Linux."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),  # µs
        ("esterror", ctypes.c_long),  # µs
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def host_clock_facts() -> dict[str, Any]:
    """What is not known is None. Never raises."""
    facts: dict[str, Any] = {
        "host": os.uname().nodename,
        "synchronised": None,
        "estimated_error_ns": None,
        "maximum_error_ns": None,
        "ptp_devices": _ptp_devices(),
    }
    try:
        timex = _Timex(modes=0)  # 0: read only
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):  # no such library, no such call
        return facts
    if state >= 0:
        facts |= _kernel_facts(state, timex.status, timex.esterror, timex.maxerror)
    return facts


def _kernel_facts(state: int, status: int, estimated_us: int, maximum_us: int) -> dict[str, Any]:
    synchronised = state != _CLOCK_ERROR and not status & _UNSYNCHRONISED
    known = synchronised and estimated_us >= 0 and maximum_us >= 0
    return {
        "synchronised": synchronised,
        # Without a source the kernel's estimates are placeholders.
        "estimated_error_ns": estimated_us * 1000 if known else None,
        "maximum_error_ns": maximum_us * 1000 if known else None,
    }


def _ptp_devices() -> list[str]:
    try:
        return sorted(place.name for place in _PTP.iterdir())[:16]
    except OSError:
        return []
