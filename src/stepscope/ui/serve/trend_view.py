"""One script's step time over its runs: the picture, its changes, and all of that in words."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from stepscope.records.figures import (
    interval,
    longer_or_shorter,
    milliseconds,
    percent,
    relative_change,
    relative_interval,
    trimmed,
)
from stepscope.records.words import counted
from stepscope.ui.html.svg import circle, drawing, path, round_values, short_tick, text
from stepscope.ui.serve.run_rows import compare_address, has_trend, trend_address, when
from stepscope.verify.run_trend import FEWEST_RUNS, LEVEL, find_run_changes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from markupsafe import Markup

    from stepscope.ui.serve.run_index import IndexedRun
    from stepscope.verify.run_trend import RunLevelChange

_WIDTH, _HEIGHT = 1000, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 984, 16, 300
_LEVELS = 5
_MOST_TICKS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSeries:
    """A row of the list of scripts."""

    script: str
    device: str
    ranks: int
    runs: int
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeWords:
    """A change as the table prints it; the run is the first one after it."""

    id: str
    name: str
    started: str
    before: str
    after: str
    change: str
    between: str
    chance: str
    compare: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendView:
    verdict: str
    about: str
    caption: str
    chart: Markup
    changes: tuple[ChangeWords, ...]


def list_series(runs: Sequence[IndexedRun]) -> list[ScriptSeries]:
    """Scripts with a step time, those with most runs first."""
    first: dict[str, IndexedRun] = {}
    counts: Counter[str] = Counter()
    for run in runs:
        if has_trend(run):
            address = trend_address(run)
            first.setdefault(address, run)
            counts[address] += 1
    return [
        ScriptSeries(
            script=first[address].script or "",
            device=first[address].device or "-",
            ranks=first[address].world_size or 1,
            runs=count,
            target=address,
        )
        for address, count in counts.most_common()
    ]


def runs_of_series(
    runs: Sequence[IndexedRun], script: str, device: str, ranks: int
) -> list[IndexedRun]:
    """In the order of time. A run whose command failed still counts; one that goes on does not."""
    chosen = [
        run
        for run in runs
        if run.kind == "run"
        and run.step_ms
        and run.state != "running"
        and run.script == script
        and (run.device or "") == device
        and (run.world_size or 1) == ranks
    ]
    return sorted(chosen, key=lambda run: (run.started_unix or 0.0, run.name))


def make_trend(runs: Sequence[IndexedRun]) -> TrendView:
    """`runs` are at least one, of one series."""
    steps = [run.step_ms or 0.0 for run in runs]
    changes = find_run_changes(steps)
    script = Path(runs[-1].script or "").name
    device, ranks = runs[-1].device or "unknown device", runs[-1].world_size or 1
    on = f"{device}, {counted(ranks, 'rank')}"
    return TrendView(
        verdict=_verdict(script, steps, changes),
        about=f"{counted(len(runs), 'run')} on {on}, {when(runs[0].started_unix)} to "
        f"{when(runs[-1].started_unix)}.",
        caption=_caption(len(runs)),
        chart=draw_trend(runs, changes),
        changes=tuple(_change_words(runs, change) for change in reversed(changes)),
    )


def _verdict(script: str, steps: Sequence[float], changes: Sequence[RunLevelChange]) -> str:
    if not changes:
        if len(steps) < FEWEST_RUNS:
            return f"{script}: {counted(len(steps), 'run')}. Finding a change needs {FEWEST_RUNS}."
        return f"{script}: the step did not change over {counted(len(steps), 'run')}."
    last = changes[-1]
    change = longer_or_shorter(last.change)
    return f"{script}: the step is {change} since run {last.at + 1} of {len(steps)}."


def _caption(runs: int) -> str:
    if runs < FEWEST_RUNS:
        return "A dot is a run's mean steady step, with its 95% interval."
    return (
        "A dot is a run's mean steady step, with its 95% interval. Lines are medians between "
        f"changes. At most {trimmed(percent(LEVEL))} of series without a change show one "
        "(permutation test on ranks)."
    )


def _change_words(runs: Sequence[IndexedRun], change: RunLevelChange) -> ChangeWords:
    first, last = runs[change.at], runs[change.at - 1]
    known = change.low is not None and change.high is not None
    ends = relative_interval(change.low or 0, change.high or 0)
    return ChangeWords(
        id=first.id,
        name=first.name,
        started=when(first.started_unix),
        before=milliseconds(change.before_ms),
        after=milliseconds(change.after_ms),
        change=relative_change(change.change),
        between=ends if known else "too few runs",
        chance=percent(change.chance),
        compare=compare_address(last, first),
    )


def draw_trend(runs: Sequence[IndexedRun], changes: Sequence[RunLevelChange]) -> Markup:
    """One dot per run in the order of time, evenly spaced."""
    steps = [run.step_ms or 0.0 for run in runs]
    ends = [end for run in runs for end in (run.low_ms, run.high_ms) if end is not None]
    top = 1.5 * max(steps)  # an absurdly wide interval does not squeeze the dots
    low, high = min([*steps, *ends]), min(max([*steps, *ends]), top)
    room = 0.08 * (high - low) or 0.05 * high or 1.0
    low, high = max(0.0, low - room), high + room

    def x(at: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (at + 0.5) / len(runs)

    def y(ms: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (min(max(ms, low), high) - low) / (high - low)

    parts = _grid(low, high, y)
    parts += [
        text("tick is-middle", x(at), _BOTTOM + 20, when(runs[at].started_unix))
        for at in range(0, len(runs), max(1, -(-len(runs) // _MOST_TICKS)))
    ]
    for at, run in enumerate(runs):
        if run.low_ms is not None and run.high_ms is not None:
            parts.append(path("whisker", [(x(at), y(run.low_ms)), (x(at), y(run.high_ms))]))
        parts.append(circle("dot", x(at), y(steps[at]), 3.2, title=_dot_words(run)))
    edges = [0, *(change.at for change in changes), len(runs)]
    for start, end in itertools.pairwise(edges):
        level = y(median(steps[start:end]))
        parts.append(path("median", [(x(start - 0.4), level), (x(end - 0.6), level)]))
    for change in changes:
        parts.append(path("cut", [(x(change.at - 0.5), _TOP), (x(change.at - 0.5), _BOTTOM)]))
    return drawing(_WIDTH, _HEIGHT, "Step time of each run, in the order of time", parts)


def _grid(low: float, high: float, y: Callable[[float], float]) -> list[str]:
    # Figures have three digits: steps that are finer would carry the same words twice.
    finest = 10.0 ** (math.floor(math.log10(high)) - 2)
    step = max(finest, next(iter(round_values(high - low, _LEVELS)), finest))
    parts = []
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        level = number * step
        parts.append(path("grid", [(_LEFT, y(level)), (_RIGHT, y(level))]))
        parts.append(text("level", _LEFT - 8, y(level), short_tick(milliseconds(level))))
    return parts


def _dot_words(run: IndexedRun) -> str:
    known = run.low_ms is not None and run.high_ms is not None
    ends = f" ({interval(run.low_ms or 0, run.high_ms or 0)})" if known else ""
    return f"{run.name}, {when(run.started_unix)}: {milliseconds(run.step_ms or 0)}{ends}"
