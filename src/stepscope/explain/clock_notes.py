"""What to know about the clocks of the ranks and their hosts before trusting waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.records.figures import duration
from stepscope.records.quality import Note
from stepscope.records.words import counted
from stepscope.trace.run_clocks import describe_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepscope.records.job import Clock, ClockSet, HostClock, RankPart

_APART_NS = 1_000_000_000
_OFF_NS = 1_000_000  # an unkept clock that is closer harms nobody yet


def about_hosts(clock: Clock, parts: Sequence[RankPart]) -> Clock:
    """The same clock, with those of the hosts, and why meetings failed."""
    problems = dict.fromkeys(problem for part in parts for problem in part.clock_notes)
    return replace(clock, hosts=describe_hosts(parts, clock), notes=tuple(problems))


def clock_notes(clock: Clock) -> Iterator[Note]:
    yield from _alignment_notes(clock)
    for host in clock.hosts:
        if host.was_set:
            detail = f"the clock of {host.host} was set {_set_words(host.was_set[0])}"
            rest = "; waits in these steps are not known, all others are aligned"
            yield Note(id="host-clock-set", detail=f"{detail}{rest}", count=len(host.was_set))
    if clock.notes:
        yield Note(id="clock-meetings", detail=clock.notes[0], count=len(clock.notes))
    adrift = unkept_hosts(clock)
    if adrift:
        yield Note(id="clock-not-kept", detail=unkept_words(adrift), count=len(adrift))


def _alignment_notes(clock: Clock) -> Iterator[Note]:
    if clock.contradicts:
        yield Note(id="clocks-contradict", detail=clock.detail)
        return
    far = {rank: ns for rank, ns in clock.offset_ns.items() if abs(ns) > _APART_NS}
    if far:
        rank, ns = max(far.items(), key=lambda pair: abs(pair[1]))
        detail = f"clocks are {duration(abs(ns))} apart (rank {rank}); they were aligned"
        yield Note(id="clocks-apart", detail=detail, count=len(far))
    if clock.unconnected:
        yield Note(id="rank-not-aligned", detail=clock.detail)


def _set_words(setting: ClockSet) -> str:
    way = "forward" if setting.by_ns > 0 else "back"
    words = f"{duration(abs(setting.by_ns))} {way}"
    if setting.after_step is None or setting.before_step is None:
        return words
    return f"{words} between steps {setting.after_step} and {setting.before_step}"


def unkept_hosts(clock: Clock) -> list[HostClock]:
    """Hosts that neither NTP nor PTP keeps and that are off by more than 1 ms, the worst first."""
    hosts = [
        host
        for host in clock.hosts
        if host.synchronised is False and abs(host.offset_ns or 0) > _OFF_NS
    ]
    return sorted(hosts, key=lambda host: -abs(host.offset_ns or 0))


def unkept_words(hosts: Sequence[HostClock]) -> str:
    worst = hosts[0]
    off_ns = worst.offset_ns or 0
    others = f", and {counted(len(hosts) - 1, 'more host')}" if len(hosts) > 1 else ""
    return (
        f"the clock of {worst.host}{others} is not kept by NTP or PTP: it is "
        f"{duration(abs(off_ns))} {'ahead' if off_ns > 0 else 'behind'}; start chronyd there"
    )
