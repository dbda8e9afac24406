"""Put rows of the list and one script's trend over its runs into words, and choose which of
them a search asks for.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup

from stepscope.text.figures import (
    interval,
    longer_or_shorter,
    milliseconds,
    percent,
    relative_change,
    relative_interval,
    size,
    trimmed,
)
from stepscope.text.words import counted
from stepscope.ui.html.svg import circle, drawing, path, round_values, short_tick, text
from stepscope.ui.serve.listed_runs import BROKEN, FAILED, OPEN, ORDERS, RUNNING, IndexedRun
from stepscope.ui.words import or_dash
from stepscope.verify.run_trend import FEWEST_RUNS, LEVEL, RunLevelChange, find_run_changes

PER_PAGE = 1000
_JSON_NAMES = (
    *("id", "name", "kind", "state", "script", "command", "started_unix", "device", "world_size"),
    *("step_ms", "low_ms", "high_ms", "steps", "mfu", "peak_bytes", "verdict", "problem"),
)
_TAG = "tag:"
_TONES = {RUNNING: "running", FAILED: "bad", BROKEN: "bad", OPEN: "open"}
_HEADS = (
    ("Run", "name"),
    ("State", "state"),
    ("Verdict", None),
    ("Step", "step_ms"),
    ("MFU", "mfu"),
    ("Memory", "peak_bytes"),
    ("Device", "device"),
    ("Script", "script"),
    ("Started", "started_unix"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """What of the list is asked for, as in the page's address."""

    search: str = ""
    order: str = "started_unix"
    descending: bool = True
    page: int = 1

    @classmethod
    def from_address(cls, given: Mapping[str, str]) -> ListQuery:
        """Anything odd is as if it were not given."""
        order = given.get("sort", "")
        page = given.get("page", "1")
        return cls(
            search=given.get("q", "")[:200],
            order=order if order in ORDERS else "started_unix",
            descending=given.get("down", "1") != "0",
            page=int(page) if page.isascii() and page.isdigit() and 0 < len(page) < 6 else 1,
        )

    def address(self, **changes: Any) -> str:
        given = {
            "q": self.search,
            "sort": self.order,
            "down": int(self.descending),
            "page": self.page,
        } | changes
        return f"/?{urlencode(given, errors='replace')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWords:
    """One run as the pages print it."""

    id: str
    name: str
    kind: str
    state: str
    tone: str
    verdict: str
    problem: str
    step: str
    mfu: str
    memory: str
    device: str
    script: str
    script_path: str
    trend: str
    started: str
    command: str
    tags: tuple[str, ...]
    comparable: bool


def describe(run: IndexedRun, tags: tuple[str, ...] = ()) -> RunWords:
    state = run.state or "being read"
    ranks = f" × {run.world_size}" if run.world_size and run.world_size > 1 else ""
    verdict = run.verdict or run.problem or ("" if run.explained else "…")
    if run.state == RUNNING and not run.verdict:
        verdict = "training: its page shows it live"
    return RunWords(
        id=run.id,
        name=run.name,
        kind=run.kind,
        state="tune" if run.kind == "tune" and state != BROKEN else state,
        tone=_TONES.get(state, "done"),
        verdict=verdict,
        problem=run.problem or "",
        step=or_dash(run.step_ms, milliseconds),
        mfu=or_dash(run.mfu, percent),
        memory=or_dash(run.peak_bytes, size),
        device=f"{run.device}{ranks}" if run.device else "-",
        script=Path(run.script).name if run.script else "",
        script_path=run.script or "",
        trend=trend_address(run) if has_trend(run) else "",
        started=when(run.started_unix),
        command=run.command or "",
        tags=tags,
        comparable=run.kind == "run" and not (run.step_ms is None and run.verdict is None),
    )


def has_trend(run: IndexedRun) -> bool:
    """Return whether the page of its series has a place for this run."""
    return run.kind == "run" and bool(run.script and run.step_ms)


def trend_address(run: IndexedRun) -> str:
    """Return the runs that this one can be compared with: same script, device and ranks."""
    series = {
        "script": run.script or "",
        "device": run.device or "",
        "ranks": run.world_size or 1,
    }
    return f"/trends?{urlencode(series, errors='replace')}"


def compare_address(a: IndexedRun, b: IndexedRun, page: str = "/compare") -> str:
    return f"{page}?{urlencode({'a': a.id, 'b': b.id})}"


def when(unix: float | None) -> str:
    """Local time, to the minute."""
    if unix is None:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
    except (OverflowError, ValueError, OSError):  # a clock that is off by ages
        return "-"


def matching(
    runs: Iterable[IndexedRun], search: str, tags: Mapping[str, tuple[str, ...]]
) -> list[IndexedRun]:
    """Runs that hold every word; tag:NAME asks for the whole tag."""
    words = search.lower().split()
    wanted = {word.removeprefix(_TAG) for word in words if word.startswith(_TAG)}
    words = [word for word in words if not word.startswith(_TAG)]
    if not words and not wanted:
        return list(runs)
    found = []
    for run in runs:
        own = tags.get(run.id, ())
        parts = (run.name, run.script, run.verdict, run.device, run.state, run.problem, run.id)
        text = "\n".join(part for part in (*parts, *own) if part).lower()
        named = {word for tag in own for word in tag.lower().split()}
        if wanted <= named and all(word in text for word in words):
            found.append(run)
    return found


def list_context(
    runs: list[IndexedRun], query: ListQuery, tags: Mapping[str, tuple[str, ...]], waiting: int
) -> dict[str, Any]:
    """Return what rows.html.j2 prints: one page of the runs that the query asks for."""
    found = matching(runs, query.search, tags)
    pages = max(1, -(-len(found) // PER_PAGE))
    page = min(query.page, pages)
    shown = found[(page - 1) * PER_PAGE : page * PER_PAGE]
    summary = counted(len(runs), "run")
    if len(found) != len(runs):
        summary = f"{len(found):,} of {summary}"
    if not runs:
        summary = "No run yet: `stepscope run -- COMMAND` makes one."
    return {
        "rows": [describe(run, tags.get(run.id, ())) for run in shown],
        "heads": [_head(name, column, query) for name, column in _HEADS],
        "pages": [
            (number, query.address(page=number), number == page) for number in range(1, pages + 1)
        ],
        "summary": f"{summary}; {waiting:,} still being read" if waiting and runs else summary,
    }


def _head(name: str, column: str | None, query: ListQuery) -> tuple[str, str | None, str | None]:
    if column is None:
        return name, None, None
    is_sorted = column == query.order
    descending = not query.descending if is_sorted else column not in ("name", "script", "state")
    direction = "descending" if query.descending else "ascending"
    target = query.address(sort=column, down=int(descending), page=1)
    return name, target, direction if is_sorted else None


def run_json(run: IndexedRun, tags: tuple[str, ...]) -> dict[str, Any]:
    """Return one row of /runs.json."""
    return {name: getattr(run, name) for name in _JSON_NAMES} | {"tags": list(tags)}


# One script's step time over its runs: the picture, its changes, and all of that in words.

_WIDTH, _HEIGHT = 1000, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 984, 16, 300
_LEVELS = 5
_MOST_TICKS = 6


def list_series(runs: Sequence[IndexedRun]) -> list[dict[str, Any]]:
    """Return rows for the scripts with a step time, those with most runs first."""
    first: dict[str, IndexedRun] = {}
    counts: Counter[str] = Counter()
    for run in runs:
        if has_trend(run):
            address = trend_address(run)
            first.setdefault(address, run)
            counts[address] += 1
    return [
        {
            "script": first[address].script or "",
            "device": first[address].device or "-",
            "ranks": first[address].world_size or 1,
            "runs": count,
            "target": address,
        }
        for address, count in counts.most_common()
    ]


def runs_of_series(
    runs: Sequence[IndexedRun], script: str, device: str, ranks: int
) -> list[IndexedRun]:
    """Sort them by time. A run whose command failed still counts; one that goes on does not."""
    series = (script, device, ranks)
    chosen = [
        run
        for run in runs
        if run.kind == "run" and run.step_ms and run.state != RUNNING
        if (run.script, run.device or "", run.world_size or 1) == series
    ]
    return sorted(chosen, key=lambda run: (run.started_unix or 0.0, run.name))


def make_trend(runs: Sequence[IndexedRun]) -> dict[str, Any]:
    """Return what the page shows of one series, which has at least one run."""
    steps = [run.step_ms or 0.0 for run in runs]
    changes = find_run_changes(steps)
    script = Path(runs[-1].script or "").name
    device, ranks = runs[-1].device or "unknown device", runs[-1].world_size or 1
    on = f"{device}, {counted(ranks, 'rank')}"
    caption = "A dot is a run's mean steady step, with its 95% interval."
    if len(runs) >= FEWEST_RUNS:
        caption += (
            f" Lines are medians between changes. At most {trimmed(percent(LEVEL))} of series "
            "without a change show one (permutation test on ranks)."
        )
    return {
        "verdict": _verdict(script, steps, changes),
        "about": f"{counted(len(runs), 'run')} on {on}, {when(runs[0].started_unix)} to "
        f"{when(runs[-1].started_unix)}.",
        "caption": caption,
        "chart": draw_trend(runs, changes),
        "changes": [_change_words(runs, change) for change in reversed(changes)],
    }


def _verdict(script: str, steps: Sequence[float], changes: Sequence[RunLevelChange]) -> str:
    if not changes:
        if len(steps) < FEWEST_RUNS:
            return f"{script}: {counted(len(steps), 'run')}. Finding a change needs {FEWEST_RUNS}."
        return f"{script}: the step did not change over {counted(len(steps), 'run')}."
    last = changes[-1]
    change = longer_or_shorter(last.change)
    return f"{script}: the step is {change} since run {last.at + 1} of {len(steps)}."


def _change_words(runs: Sequence[IndexedRun], change: RunLevelChange) -> dict[str, str]:
    """Return a row of the table; the run is the first one after the change."""
    first, last = runs[change.at], runs[change.at - 1]
    known = change.low is not None and change.high is not None
    ends = relative_interval(change.low or 0, change.high or 0)
    return {
        "id": first.id,
        "name": first.name,
        "started": when(first.started_unix),
        "before": milliseconds(change.before_ms),
        "after": milliseconds(change.after_ms),
        "change": relative_change(change.change),
        "between": ends if known else "too few runs",
        "chance": percent(change.chance),
        "compare": compare_address(last, first),
    }


def draw_trend(runs: Sequence[IndexedRun], changes: Sequence[RunLevelChange]) -> Markup:
    """Draw one dot per run in the order of time, evenly spaced."""
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
