"""Steps take longer than they did before: from some step on, for a while, or ever more."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from stepscope.explain.findings.evidence import LOW, from_run, severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.explanation import Place
from stepscope.records.run import CORE_WAIT, LevelChange, RankRun, Trend
from stepscope.text.figures import factor, milliseconds, percent
from stepscope.text.words import sentence

_AS_BEFORE = 0.05  # a last level this near to the best one is back to normal
_MOST = 0.5  # of a rise
_GROWS = {  # the first that is most of a rise is named
    CORE_WAIT: "waiting for a core",
    "data": "waiting for data",
    "optimizer": "in the optimizer",
    "backward": "in backward",
    "forward": "in forward",
}
_TIMES = 1.5  # from here on a factor reads better than a percentage


class _Slower(NamedTuple):
    """One way in which steps slow down."""

    share: float  # of the mean step, over the whole run
    last: float  # of the last steps
    summary: str
    evidence: tuple[str, ...]


def find_in(run: RankRun) -> Finding | None:
    """Levels that rise, or a drift upwards, that cost 3% of the mean step or more. As a longer run
    would only go on, what the last steps lose says how severe it is."""
    ways = [way for way in (_by_levels(run), _by_drift(run.trend)) if way is not None]
    ways = sorted((way for way in ways if way.share >= LOW), key=lambda way: -way.share)
    if not ways:
        return None
    worst, *others = ways
    rises = [change for change in run.changes if change.factor > 1]
    crowded = any(_main_cause(change) == CORE_WAIT for change in rises)
    lines = _where(run)
    return RULE.finding(
        share=worst.share,
        severity=severity(max(worst.share, worst.last)),
        summary=f"{sentence(worst.summary)}.",
        evidence=(*worst.evidence, *(other.summary for other in others)),
        where=_where(run),
        remedies=(
            (
                *((remedies.IDLE_MACHINE.offer(),) if crowded else ()),
                *(
                    (remedies.LOOK_AT_LINE.offer(_look_at(lines[0])),)
                    if lines and not crowded
                    else ()
                ),
                remedies.LATE_WINDOW.offer(),
                remedies.CHECK_HOST.offer(
                    "Look for a device that throttles, other processes, and lists or logs that grow"
                ),
            )
        ),
    )


def _where(run: RankRun) -> tuple[Place, ...]:
    """The lines of the largest rise."""
    rises = [change for change in run.changes if change.factor > 1]
    rise = max(rises, key=lambda change: change.after_ms - change.before_ms, default=None)
    return rise.where if rise is not None else ()


def _look_at(place: Place) -> str:
    return f"Look at {place.words}: since then it takes longer, or runs more often"


def _main_cause(change: LevelChange) -> str | None:
    """What most of a rise is, if any one thing is."""
    least = _MOST * (change.after_ms - change.before_ms)
    return next((name for name in _GROWS if change.more_ms.get(name, 0.0) > least > 0), None)


def _of_it(change: LevelChange) -> str:
    """`, 15.0 ms of it waiting for data`."""
    cause = _main_cause(change)
    if cause is None:
        return ""
    more = min(change.more_ms[cause], change.after_ms - change.before_ms)
    return f", {milliseconds(more)} of it {_GROWS[cause]}"


def _by_levels(run: RankRun) -> _Slower | None:
    if not run.changes or run.times is None:
        return None
    levels = [run.changes[0].before_ms, *(change.after_ms for change in run.changes)]
    best = [min(levels[: place + 1]) for place in range(len(levels))]
    above = [level - least for level, least in zip(levels, best, strict=True)]
    # How many steps each level lasted; the first begins after the warm-up.
    first, end = run.warm_up, run.steps
    if run.series is not None and len(run.series.number):
        first = int(run.series.number[min(run.warm_up, len(run.series.number) - 1)])
        end = int(run.series.number[-1]) + 1
    edges = [first, *(change.step for change in run.changes), end]
    lengths = [max(1, after - before) for before, after in itertools.pairwise(edges)]
    cost = sum(ms * steps for ms, steps in zip(above, lengths, strict=True)) / sum(lengths)
    last = above[-1] / levels[-1]
    return _Slower(
        share=cost / run.times.mean_ms,
        last=last,
        summary=_describe_levels(run, best[-1], levels[-1]),
        evidence=(
            f"{milliseconds(cost)} of the {milliseconds(run.times.mean_ms)} mean step",
            *(_describe_change(change) for change in run.changes),
        ),
    )


def _describe_levels(run: RankRun, best: float, last: float) -> str:
    if last > best * (1 + _AS_BEFORE):
        rise = max(run.changes, key=lambda change: change.after_ms - change.before_ms)
        most = "mostly " if len(run.changes) > 1 else ""
        return (
            f"steps take {_longer(last / best)}, {most}from step {rise.step:,} on: "
            f"{milliseconds(last)} instead of {milliseconds(best)}{_of_it(rise)}"
        )
    rise = max(run.changes, key=lambda change: change.factor)
    later = next((change for change in run.changes if change.step > rise.step), None)
    until = f" to {later.step - 1:,}" if later else " and later"
    longer = f"{_longer(rise.factor)}{_of_it(rise)}"
    return f"steps {rise.step:,}{until} take {longer}; the others do not"


def _longer(times: float) -> str:
    return f"{factor(times)} times as long" if times >= _TIMES else f"{percent(times - 1)} longer"


def _describe_change(change: LevelChange) -> str:
    where = (
        f"step {change.step:,}"
        if change.low == change.high
        else f"step {change.step:,} (between {change.low:,} and {change.high:,})"
    )
    return (
        f"{where}: {milliseconds(change.before_ms)} before, {milliseconds(change.after_ms)} after"
        f"{_of_it(change)}"
    )


def _by_drift(trend: Trend | None) -> _Slower | None:
    if trend is None or trend.growth <= 0:
        return None
    memory = {
        True: ("steps are longer where more memory is allocated",),
        False: ("the time does not follow the allocated memory",),
        None: (),
    }[trend.follows_memory]
    return _Slower(
        share=trend.growth / 2 / (1 + trend.growth / 2),
        last=trend.growth / (1 + trend.growth),
        summary=f"steps get slower all the time: the last ones take {percent(trend.growth)} longer "
        "than the first",
        evidence=(f"{percent(trend.low)} to {percent(trend.high)} longer, over the run", *memory),
    )


RULE = FindingRule(id="slows-down", title="Slows down", find=from_run(find_in))
