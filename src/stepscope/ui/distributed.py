"""Several ranks in words, for every surface: who holds the others back, how good the clock is."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Literal

from stepscope.records.figures import duration
from stepscope.records.words import sentence

if TYPE_CHECKING:
    from stepscope.records.job import (
        Clock,
        CriticalPath,
        Job,
        JobCollective,
        Straggler,
        Stragglers,
    )

Tone = Literal["good", "bad", "open"]

CAUSES = {"compute": "slow compute", "input": "slow input", "link": "slow link"}
NOT_ALIGNED = "the ranks' clocks are not aligned, so the order of arrivals is not known"
NOTHING_SHARED = "no collective in which ranks wait for each other was recorded by two of them"
WITHIN_ERROR = "no rank arrived last by more than the clock's error bar"
_TONES: dict[str, Tone] = {"none": "good", "found": "bad"}


def who(straggler: Straggler) -> str:
    """The rank or, for a link, the group."""
    return f"rank {straggler.rank}" if straggler.rank is not None else f"group {straggler.group}"


def straggler_words(stragglers: Stragglers) -> str:
    """The verdict in one sentence."""
    if stragglers.verdict == "found":
        return _accusation(stragglers.ranks)
    if stragglers.verdict == "none":
        return f"No rank holds the others back: {stragglers.detail or 'none stands out'}."
    if stragglers.verdict == "one rank only":
        return "Only one rank recorded anything: there is no other rank to compare it with."
    reason = stragglers.detail or "too little was recorded"
    return f"Whether a rank holds the others back is not resolved: {reason}."


def straggler_tone(stragglers: Stragglers) -> Tone:
    """Good, bad, or open."""
    return _TONES.get(stragglers.verdict, "open")


def _accusation(found: tuple[Straggler, ...]) -> str:
    worst = found[0]
    what = {
        "compute": f"its own work takes {worst.slowdown:.2f} times the other ranks' time",
        "input": f"it waits for its data and takes {worst.slowdown:.2f} times the others' time",
        "link": f"its transfers take {worst.slowdown:.2f} times what they should",
    }[worst.cause]
    name = who(worst)
    also = f"; {len(found) - 1} more: see the table" if len(found) > 1 else ""
    return (
        f"{sentence(name)} holds the others back: {what}, which costs "
        f"{duration(worst.cost_ms * 1e6)} a step{also}."
    )


def worst_error_ns(clock: Clock) -> int:
    """The widest error bar of any rank."""
    return max(clock.error_ns.values(), default=0)


def clock_words(clock: Clock) -> str:
    """How well the ranks' clocks agree, and from what that is known."""
    if not clock.aligned:
        return f"Clocks are not aligned: {clock.detail or 'nothing ties the ranks together'}."
    others = [error for rank, error in clock.error_ns.items() if rank != clock.reference]
    worst = max(others, default=0)
    typical = median(others) if others else 0
    bar = error_words(worst)
    if len(others) > 3 and typical < 0.7 * worst:
        bar += f" (typically {error_words(typical)})"
    return f"Clocks are aligned within {bar}, {clock.detail}."


def path_words(path: CriticalPath, most: int = 3) -> str:
    """What decided the step, the largest share first."""
    shares = [(share, f"rank {rank}'s work") for rank, share in path.share_by_rank.items()]
    shares.append((path.transfer_share, "transfers"))
    shares = sorted((each for each in shares if each[0] >= 0.005), reverse=True)
    told = [f"{what} {share:.0%}" for share, what in shares[:most]]
    rest = sum(share for share, _ in shares[most:])
    if rest >= 0.005:
        told.append(f"other ranks' work {rest:.0%}")
    return ", ".join(told)


def group_words(row: JobCollective) -> str:
    """A group as people know it: torch's name, and what it is for where the trace says so."""
    return f"{row.group} {row.description}".strip() or "-"


def resolved(row: JobCollective) -> bool | None:
    """Whether the wait is larger than the clock's error bar; None where clocks say nothing."""
    if row.wait_ns is None or row.wait_error_ns is None:
        return None
    return row.wait_ns > row.wait_error_ns


def wait_words(row: JobCollective) -> str:
    """One call's wait with its error bar; smaller than that it is not resolved."""
    clear = resolved(row)
    if clear is None or row.wait_ns is None or row.wait_error_ns is None:
        return "-"
    error = error_words(row.wait_error_ns / row.count)
    return f"{duration(row.wait_ns / row.count)} {error}" if clear else f"within {error}"


def error_words(ns: float) -> str:
    """An error bar needs no more than two digits."""
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= scale:
            value = ns / scale
            return f"±{value:.0f} {unit}" if value >= 10 else f"±{value:.1f} {unit}"
    return f"±{ns:.0f} ns"


def no_arrivals(job: Job) -> str:
    """Why nobody can be said to come last; empty where somebody can."""
    if any(row.times_last for row in job.arrivals):
        return ""
    if not job.clock.aligned:
        return NOT_ALIGNED
    return WITHIN_ERROR if job.arrivals else NOTHING_SHARED
