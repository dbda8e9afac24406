"""Findings about training through a parameter server."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import HIGH, LOW, rule
from stepscope.explain.parameter_server import describe_staleness, name_blockers
from stepscope.records.change_values import Consistency
from stepscope.records.explanation import Finding, Remedy
from stepscope.records.parameter_server import Straggling, TogetherSummary
from stepscope.text.figures import milliseconds, percent, significant
from stepscope.text.words import counted

_LOOK = remedies.CHECK_HOST.offer(
    "Look for what delays one worker at a time: other processes, disks, batches that take longer"
)
_LARGER_BOUND = remedies.BOUNDED_STALENESS.offer(
    "Raise the bound, such as bounded:3 to bounded:8: workers may then run further ahead"
)
_PERSISTENT = (
    remedies.NO_STRAGGLER.offer(
        "Find what slows this worker: other processes, low clocks or a smaller device"
    ),
    remedies.BALANCE.offer("Give the slow worker smaller batches, or leave it out"),
    remedies.NO_BARRIER.offer(),
)


@rule("Workers wait", scope="together")
def barrier_waits(summary: TogetherSummary) -> Finding | None:
    """Workers of a parameter server wait for each other. Blocked time that a consistency
    which pays still has, or that a barrier costs."""
    straggling = summary.straggling
    if summary.verdict == "does not pay" or straggling is None or summary.blocked_share < LOW:
        return None
    if Consistency.parse(summary.consistency).largest_gap is None:
        return None  # nobody waits for others: what is left is asking for permission
    runs_ahead = summary.verdict != "barrier"
    share = f"for {percent(summary.blocked_share)} of their time ({summary.consistency})"
    # What a barrier costs is told with what running ahead would change.
    return barrier_waits.finding(
        share=summary.blocked_share,
        of="run",
        summary=f"Workers still wait for others {share}."
        if runs_ahead
        else f"Workers wait for others {share}. {summary.why}",
        evidence=(*((summary.why,) if runs_ahead else ()), *name_blockers(summary)),
        remedies=_choose_remedies(straggling, runs_ahead=runs_ahead),
    )


def _choose_remedies(straggling: Straggling, *, runs_ahead: bool) -> tuple[Remedy, ...]:
    if straggling.kind == "persistent":
        return _PERSISTENT
    return (_LARGER_BOUND if runs_ahead else remedies.BOUNDED_STALENESS.offer(), _LOOK)


_BUSY = 0.6  # of the run: above, requests queue for longer than they are served


@rule("Server-bound", scope="together")
def server_bound(summary: TogetherSummary) -> Finding | None:
    """The parameter server cannot keep up with its workers. A shard that is busy for most of
    the run, while workers wait for its answers."""
    busiest = max(summary.shards, key=lambda shard: shard.busy_share, default=None)
    if busiest is None or busiest.busy_share < _BUSY:
        return None
    whole = sum(worker.whole_ns for worker in summary.workers)
    share = sum(worker.pull_ns + worker.push_ns for worker in summary.workers) / max(whole, 1)
    if share < LOW:
        return None
    shards = counted(len(summary.shards), "shard")
    return server_bound.finding(
        share=share,
        of="run",
        summary=f"Workers spend {percent(share)} of their time on pulls and pushes. Shard "
        f"{busiest.shard} of {shards} is busy for {percent(busiest.busy_share)} of the run.",
        evidence=(
            f"{significant(busiest.mean_queue or 0.0)} requests wait at it on average, each for "
            f"{milliseconds(busiest.mean_wait_ms or 0.0)}",
        ),
        remedies=(
            remedies.MORE_SHARDS.offer(),
            remedies.COMPRESS_PUSHES.offer(),
        ),
    )


@rule("Staleness does not pay", scope="together")
def staleness_does_not_pay(summary: TogetherSummary) -> Finding | None:
    """Reads are stale, and no more updates come of it than a barrier would give. Medium at
    least: stale gradients cost convergence and buy nothing."""
    straggling = summary.straggling
    if summary.verdict != "does not pay" or straggling is None:
        return None
    slow = (
        remedies.NO_STRAGGLER.offer(
            "Find what slows this worker: other processes, low clocks or a smaller device"
        ),
        remedies.BALANCE.offer("Give the slow worker smaller batches, or leave it out"),
    )
    return staleness_does_not_pay.finding(
        share=summary.blocked_share,
        of="run",
        severity="high" if summary.blocked_share >= HIGH else "medium",
        summary=summary.why,
        evidence=(*describe_staleness(summary), *name_blockers(summary)),
        remedies=(
            *(slow if straggling.kind == "persistent" else ()),
            remedies.KEEP_BARRIER.offer(),
        ),
    )
