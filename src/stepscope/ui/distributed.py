"""Several ranks in words for every surface: who holds the others back, how well clocks agree."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Literal

from stepscope.explain.clock_notes import unkept_hosts, unkept_words
from stepscope.records.figures import duration, factor, percent, significant
from stepscope.records.words import counted, sentence

if TYPE_CHECKING:
    from stepscope.records.job import (
        Clock,
        CriticalPath,
        Job,
        JobCollective,
        LastArriver,
        Straggler,
        Stragglers,
    )
    from stepscope.records.network_place import NetworkPlace

Tone = Literal["good", "bad", "open"]

CAUSES = {"compute": "slow compute", "input": "slow input", "link": "slow link"}
NOT_ALIGNED = "the ranks' clocks are not aligned, so the order of arrivals is not known"
NOTHING_SHARED = "no two ranks recorded a collective in which ranks wait for each other"
WITHIN_ERROR = "no rank arrived last by more than the clock's error bar"
_SEEN_DRIFT_PPM = 0.1
_TONES: dict[str, Tone] = {"none": "good", "found": "bad"}


def straggler_name(straggler: Straggler) -> str:
    """The rank, the host, the link between two hosts, or the group of a slow link."""
    if straggler.rank is not None:
        return f"rank {straggler.rank}"
    if straggler.link is not None:
        return f"the link from {straggler.link[0]} to {straggler.link[1]}"
    return f"group {straggler.group}" if straggler.cause == "link" else str(straggler.host)


def rank_on_host(rank: int, job: Job) -> str:
    """rank 3 on node1, where the ranks are on several hosts."""
    several = len(set(job.hosts.values())) > 1
    return f"rank {rank} on {job.hosts[rank]}" if several and rank in job.hosts else f"rank {rank}"


def place_words(place: NetworkPlace | None) -> str:
    """Where a host stands in the network, as far as it is known."""
    if place is None:
        return ""
    parts = (("rack", place.rack), ("switch", place.switch))
    return ", ".join(f"{kind} {name}" for kind, name in parts if name)


def straggler_words(stragglers: Stragglers) -> str:
    """The verdict in one sentence."""
    if stragglers.verdict == "found":
        return _accusation(stragglers.ranks)
    if stragglers.verdict == "none":
        nobody = f"No rank holds the others back: {stragglers.detail or 'none stands out'}"
        return f"{nobody}{_wandering(stragglers.wandering)}."
    if stragglers.verdict == "one rank only":
        return "Only one rank was recorded, so there is no other rank to compare it with."
    reason = stragglers.detail or "too little was recorded"
    return f"Whether a rank holds the others back is not known: {reason}."


def straggler_tone(stragglers: Stragglers) -> Tone:
    """Good, bad, or open."""
    return _TONES.get(stragglers.verdict, "open")


def _wandering(straggler: Straggler | None) -> str:
    if straggler is None or straggler.excess_ms is None:
        return ""
    return (
        f"; in 1 step of {straggler.one_in} some rank is {duration(straggler.excess_ms * 1e6)} "
        f"late, each time another one, which costs {duration(straggler.cost_ms * 1e6)} a step"
    )


def _what(worst: Straggler) -> str:
    if worst.excess_ms is not None:
        often = "at every step" if worst.one_in is None else f"in 1 step of {worst.one_in}"
        its, waits = ("it is", "it waits") if worst.scope == "rank" else _plural(worst)
        why = f", as {waits} for data" if worst.cause == "input" else ""
        return f"{its} late by {duration(worst.excess_ms * 1e6)} {often}{why}"
    times = factor(worst.slowdown)
    if worst.link is not None:
        return f"the other links are {times} times as fast"
    return {
        "compute": f"its own work takes {times} times as long as the other ranks'",
        "input": f"it waits for its data and takes {times} times as long as the others",
        "link": f"its transfers take {times} times as long as they should",
    }[worst.cause]


def _plural(host: Straggler) -> tuple[str, str]:
    return f"its {len(host.ranks)} ranks are", "they wait"


def _accusation(stragglers: tuple[Straggler, ...]) -> str:
    worst = stragglers[0]
    name = straggler_name(worst)
    also = f"; {len(stragglers) - 1} more: see the table" if len(stragglers) > 1 else ""
    return (
        f"{sentence(name)} holds the others back: {_what(worst)}, which costs "
        f"{duration(worst.cost_ms * 1e6)} a step{also}."
    )


def worst_error_ns(clock: Clock) -> int:
    """The largest error bar of any rank."""
    return max(clock.error_ns.values(), default=0)


def clock_words(clock: Clock) -> str:
    """How well the ranks' clocks agree, and how that is known."""
    if not clock.aligned:
        return f"Clocks are not aligned: {clock.detail or 'nothing ties the ranks together'}."
    others = [error for rank, error in clock.error_ns.items() if rank != clock.reference]
    worst = max(others, default=0)
    typical = median(others) if others else 0
    bar = error_words(worst)
    if len(others) > 3 and typical < 0.7 * worst:
        bar += f" (typically {error_words(typical)})"
    return f"Clocks are aligned within {bar}, {clock.detail}.{_drift_words(clock)}"


def host_clock_words(clock: Clock) -> str:
    """What to do about a host whose clock nobody keeps, and why meetings failed; often nothing."""
    adrift = unkept_hosts(clock)
    lines = [unkept_words(adrift)] if adrift else []
    return " ".join(f"{sentence(line)}." for line in [*lines, *clock.notes[:1]])


def _drift_words(clock: Clock) -> str:
    """The fastest drift between hosts, where several meetings show it."""
    known = [(abs(host.drift_ppm or 0.0), host) for host in clock.hosts if host.meetings > 1]
    drift, host = max(known, key=lambda pair: pair[0], default=(0.0, None))
    if host is None or drift < _SEEN_DRIFT_PPM:
        return ""
    apart = f" that of {host.host} by {significant(drift)} ppm"
    return f" They drift apart over the run,{apart} ({counted(host.meetings, 'meeting')})."


def path_words(path: CriticalPath, most: int = 3) -> str:
    """What the critical path consists of, the largest share first."""
    shares = [(share, f"rank {rank}'s work") for rank, share in path.share_by_rank.items()]
    shares.append((path.transfer_share, "transfers"))
    shares = sorted((row for row in shares if row[0] >= 0.005), reverse=True)
    parts = [f"{what} {percent(share)}" for share, what in shares[:most]]
    rest = sum(share for share, _ in shares[most:])
    if rest >= 0.005:
        parts.append(f"other ranks' work {percent(rest)}")
    return ", ".join(parts)


def group_words(row: JobCollective) -> str:
    """torch's name of the group, and its purpose if the trace has it."""
    return f"{row.group} {row.description}".strip() or "-"


def resolved(row: JobCollective) -> bool | None:
    """Whether the wait exceeds the clock's error bar; None without aligned clocks."""
    if row.wait_ns is None or row.wait_error_ns is None:
        return None
    return row.wait_ns > row.wait_error_ns


def wait_words(row: JobCollective) -> str:
    """One call's wait with its error bar, or the error bar alone if the wait is smaller."""
    clear = resolved(row)
    if clear is None or row.wait_ns is None or row.wait_error_ns is None:
        return "-"
    error = error_words(row.wait_error_ns / row.count)
    return f"{duration(row.wait_ns / row.count)} {error}" if clear else f"within {error}"


def own_wait_words(row: LastArriver) -> str:
    """A rank's waiting in a step with its error bar, or the error bar alone if it is smaller."""
    if not row.wait_error_ns:
        return duration(row.waits_ns)
    error = error_words(row.wait_error_ns)
    clear = row.waits_ns > row.wait_error_ns
    return f"{duration(row.waits_ns)} ({error})" if clear else f"within {error}"


def error_words(ns: float) -> str:
    return f"±{duration(ns)}"


def no_arrivals(job: Job) -> str:
    """Why the last rank to arrive is not known; empty if it is."""
    if any(row.times_last for row in job.arrivals):
        return ""
    if not job.clock.aligned:
        return NOT_ALIGNED
    return WITHIN_ERROR if job.arrivals else NOTHING_SHARED
