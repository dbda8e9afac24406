"""Describe a running job for the live page, in words and charts, one JSON object per update,
and ask it for a window now.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.explain.whole_run.live import find_late_ranks
from stepscope.measure.folder import why_refused, write_json
from stepscope.records.folders import (
    REQUEST_FILE,
    REQUEST_ID,
    REQUEST_SCHEMA,
    plan_name,
    step_trace,
)
from stepscope.records.normal import median
from stepscope.records.rank import ALL_PHASES, StepColumns
from stepscope.records.run import STALL_CAUSES, LiveRank, LiveRun, StepSeries, VerdictNow
from stepscope.text.figures import long_duration, milliseconds, percent, significant, size
from stepscope.text.words import counted
from stepscope.trace.decode import Oddities, read_record
from stepscope.ui.words import (
    STALLS,
    VISIBLE,
    attempt_words,
    done_words,
    how_often,
    latest_changes,
    matters,
    memory_items,
    one_line,
    or_dash,
    phase_words,
    rank_name,
    samples_per_s,
    spread_words,
    stall_words,
    window_items,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.trace.run_folder.follow_run import FollowedRank, FollowedRun

# Numbers become text here, by the rules of every other surface; the page's script only places them.
# Programs read `top --json` or /metrics instead.

LIVE_SCHEMA = 1
MOST_ROWS = 64  # ranks in the table
_MOST_LINES = 8  # ranks in the chart
_RECENT_STEPS = 240
_SPARK_STEPS = 60
_STRETCHES = 160
_MOST_STALLS = 5
_MOST_LATE = 3
_HIGHEST_TOP = 6.0  # median steps
_MARKS: dict[str, str] = {
    "window": "while a window was recorded",
    **{cause: STALLS[cause][0].lower() for cause in STALL_CAUSES},
}
_BAD = frozenset({"failed", "killed", "seems to hang", "gone"})


class LiveFact(msgspec.Struct, frozen=True, kw_only=True):
    """One figure in large type, and what belongs to it in small type."""

    label: str
    value: str
    detail: str = ""


class LivePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the typical step, or a cause of stalls."""

    id: str
    words: str
    share: float
    detail: str = ""


class LiveLine(msgspec.Struct, frozen=True, kw_only=True):
    """The last steps of one rank. A mark is a cause of stalls, "window", or empty."""

    rank: str
    first: int
    ms: list[float]
    marks: list[str]


class ChartTop(msgspec.Struct, frozen=True, kw_only=True):
    """What the full height of a chart stands for."""

    value: float
    words: str


class LiveStretches(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run in equal stretches."""

    first: int
    last: int
    ms: list[float]
    marks: list[str]
    top: ChartTop


class LiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the table."""

    cells: list[str]
    tone: str  # "" or "late"
    line: int | None  # its place among the lines, if it is one of them
    spark: list[float]


class LiveView(msgspec.Struct, frozen=True, kw_only=True):
    """One update. `reload`: the job has ended, and its report can be opened."""

    schema: int = LIVE_SCHEMA
    title: str
    status: str
    tone: str  # good, bad or busy
    detail: str
    command: str = ""
    has_ended: bool = False
    reload: bool = False
    facts: tuple[LiveFact, ...] = ()
    phases: tuple[LivePart, ...] = ()
    stalls: tuple[LivePart, ...] = ()
    changes: tuple[str, ...] = ()
    lines: tuple[LiveLine, ...] = ()
    lines_top: ChartTop | None = None
    mark_words: dict[str, str] = {}  # of the marks in the lines
    stretches: LiveStretches | None = None
    memory: list[int] = []  # bytes at the ends of the last steps that were asked
    memory_top: ChartTop | None = None
    rows: tuple[LiveRow, ...] = ()
    more_ranks: int = 0  # than rows
    ranks: str = ""  # how they compare
    late: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    verdict: VerdictNow | None = None
    explaining: bool = False
    window: AskedWindow | None = None


def gone_view(folder: Path, why: str) -> LiveView:
    """The folder cannot be followed any more."""
    return LiveView(
        title=one_line(folder.name), status="gone", tone="bad", detail=one_line(why), has_ended=True
    )


def live_view(
    run: LiveRun,
    followed: FollowedRun,
    verdict: VerdictNow | None = None,
    *,
    explaining: bool = False,
    reload: bool = False,
    window: AskedWindow | None = None,
) -> LiveView:
    if verdict is not None:  # it is made from the first finding
        others = tuple(one for one in verdict.findings if one.summary not in verdict.verdict)
        verdict = replace(verdict, findings=others)
    slowest = next((rank for rank in run.by_mean if rank.last_step is not None), None)
    recent = {(one.rank, one.attempt): one.steps.recent for one in followed.ranks}
    late = find_late_ranks(run.ranks)
    # The slowest, in the order of ranks: each keeps its colour while they take turns.
    slow = sorted(run.by_mean[:_MOST_LINES], key=lambda rank: (rank.run.rank, rank.run.attempt))
    lines = tuple(_line(rank, _of(rank, recent)) for rank in slow)
    present = {mark for line in lines for mark in line.marks}
    late_ranks, drawn = {one.rank for one in late}, [line.rank for line in lines]
    memory = _memory(_of(slowest, recent)) if slowest else []
    return LiveView(
        title=one_line(Path(run.folder).absolute().name),
        status=run.status,
        tone="bad" if run.status in _BAD else "good" if run.status == "training" else "busy",
        detail=one_line(run.detail),
        command=one_line(" ".join(run.command)),
        has_ended=run.has_ended,
        reload=reload,
        facts=_facts(run, slowest, verdict) if slowest else (),
        phases=_phases(slowest) if slowest else (),
        stalls=_stalls(slowest) if slowest else (),
        changes=tuple(latest_changes(slowest)) if slowest else (),
        lines=lines,
        mark_words={mark: words for mark, words in _MARKS.items() if mark in present},
        lines_top=_top_ms([ms for line in lines for ms in line.ms]),
        stretches=_stretches(slowest) if slowest else None,
        memory=memory,
        memory_top=ChartTop(value=max(memory), words=size(max(memory))) if memory else None,
        rows=tuple(
            _row(rank, _of(rank, recent), late_ranks, drawn)
            for rank in _by_rounded_mean(run)[:MOST_ROWS]
        ),
        more_ranks=max(0, len(run.ranks) - MOST_ROWS),
        ranks=spread_words(run),
        late=tuple(
            f"rank {one.rank} spends {milliseconds(one.extra_ms)} more in {phase_words(one.phase)} "
            "than the others, who wait for it"
            for one in late[:_MOST_LATE]
        ),
        notes=(*map(one_line, run.notes), *attempt_words(run.earlier)),
        verdict=verdict,
        explaining=explaining,
        window=window,
    )


_Recent = dict[tuple[int, int], "StepColumns"]


def _of(rank: LiveRank, recent: _Recent) -> StepColumns:
    return recent[rank.run.rank, rank.run.attempt]


def _facts(run: LiveRun, rank: LiveRank, verdict: VerdictNow | None) -> tuple[LiveFact, ...]:
    times, rate = rank.run.times, rank.recent_steps_per_s
    samples = samples_per_s(run, verdict)
    rate_words = f"{or_dash(rate, significant)} steps/s"
    memory = [one.memory_bytes for one in run.ranks if one.memory_bytes is not None]
    peak = verdict.peak_bytes if verdict is not None else None
    peak_words = [] if peak is None else [f"tensors {size(peak)} at most in the window"]
    average = f"{or_dash(rank.steps_per_s, significant)} steps/s on average"
    facts = [
        LiveFact(
            label="step now",
            value=milliseconds(1000 / rate) if rate else "-",
            detail=f"mean {milliseconds(times.mean_ms)} · p99 {milliseconds(times.p99_ms)}"
            if times
            else "no steady step yet",
        ),
        LiveFact(
            label="throughput",
            value=rate_words if samples is None else f"{significant(samples)} samples/s",
            detail="" if samples is None else rate_words,
        ),
        LiveFact(
            label="done",
            value=done_words(run),
            detail=" · ".join((average, *window_items(rank))),
        ),
        LiveFact(
            label="goodput" if run.has_ended else "goodput so far",
            value=or_dash(rank.goodput, percent),
            detail=f"steady training, of {long_duration(1e9 * run.seconds)}",
        ),
        LiveFact(
            label="memory" if rank.on_device else "process memory",
            value=or_dash(max(memory, default=None), size),
            detail=" · ".join((*peak_words, *memory_items(rank)[1:])) or "when the last step ended",
        ),
    ]
    if verdict is not None and verdict.mfu is not None:
        facts.append(LiveFact(label="MFU", value=percent(verdict.mfu), detail="last window"))
    return tuple(facts)


def _phases(rank: LiveRank) -> tuple[LivePart, ...]:
    whole = sum(rank.phases_ms.values())
    return tuple(
        LivePart(
            id=phase,
            words=phase_words(phase),
            share=ms / whole,
            detail=f"{milliseconds(ms)} · {percent(ms / whole)}",
        )
        for phase in ALL_PHASES
        if (ms := rank.phases_ms.get(phase, 0.0)) > VISIBLE * whole
    )


def _stalls(rank: LiveRank) -> tuple[LivePart, ...]:
    return tuple(
        LivePart(
            id=stall.cause,
            words=stall_words(stall),
            share=stall.share,
            detail=f"{milliseconds(stall.cost_ms + stall.between_epochs_ms)} a step · "
            f"{how_often(stall)}",
        )
        for stall in [stall for stall in rank.run.stalls if matters(stall)][:_MOST_STALLS]
    )


# Charts.


def _line(rank: LiveRank, recent: StepColumns) -> LiveLine:
    last = slice(-_RECENT_STEPS, None)
    numbers = recent.number[last]
    causes = _causes(rank.run.series, numbers)
    own = (recent.window | recent.memory)[last]
    return LiveLine(
        rank=rank_name(rank.run),
        first=int(numbers[0]) if len(numbers) else 0,
        ms=_rounded(recent.step_ns[last] / 1e6),
        marks=["window" if ours else cause for cause, ours in zip(causes, own, strict=True)],
    )


def _causes(series: StepSeries | None, numbers: NDArray[np.int64]) -> list[str]:
    """Return what made these steps stall, as far as they were explained."""
    if series is None or not len(series.number):
        return [""] * len(numbers)
    places = np.searchsorted(series.number, numbers).clip(max=len(series.number) - 1)
    causes = np.where(series.number[places] == numbers, series.cause[places], -1)
    return [STALL_CAUSES[cause] if cause >= 0 else "" for cause in causes]


def _top_ms(values: Sequence[float] | NDArray[np.float64]) -> ChartTop | None:
    """Return the longest step, or six usual ones: a chart of one long step would show nothing
    else.
    """
    if not len(values):
        return None
    top = max(1e-6, min(float(np.max(values)), _HIGHEST_TOP * median(values)))
    return ChartTop(value=top, words=milliseconds(top))


def _rounded(values: NDArray[np.float64]) -> list[float]:
    """Round to four digits: a chart shows no more."""
    return list(map(float, _to_digits(values, 4)))


def _to_digits(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Round to so many significant digits."""
    scale = 10.0 ** (count - 1 - np.floor(np.log10(np.maximum(values, 1e-9))))
    rounded: NDArray[np.float64] = np.rint(values * scale) / scale
    return rounded


def _stretches(rank: LiveRank) -> LiveStretches | None:
    """Return the mean step of equal stretches, without warm-up and our own windows."""
    series = rank.run.series
    if series is None:
        return None
    chosen = np.flatnonzero(~series.window[series.warm_up :]) + series.warm_up
    count = min(_STRETCHES, len(chosen))
    if not count:
        return None
    starts = np.arange(count) * len(chosen) // count
    lengths = np.diff(starts, append=len(chosen))
    means = np.add.reduceat(series.step_ns[chosen] / 1e6, starts) / lengths
    numbers = series.number[chosen]
    return LiveStretches(
        first=int(numbers[0]),
        last=int(numbers[-1]),
        ms=_rounded(means),
        marks=_main_marks(series.cause[chosen], series.step_ns[chosen], starts),
        top=_top_ms(means) or ChartTop(value=1.0, words=""),
    )


def _main_marks(
    causes: NDArray[np.int8], step_ns: NDArray[np.int64], starts: NDArray[np.int64]
) -> list[str]:
    """For each stretch the cause whose steps took most of it."""
    present = [cause for cause in range(len(STALL_CAUSES)) if (causes == cause).any()]
    if not present:
        return [""] * len(starts)
    spent = np.array(
        [np.add.reduceat(np.where(causes == cause, step_ns, 0), starts) for cause in present]
    )
    main = spent.argmax(axis=0)
    return [
        STALL_CAUSES[present[cause]] if most else ""
        for cause, most in zip(main, spent.max(axis=0), strict=True)
    ]


def _memory(recent: StepColumns) -> list[int]:
    held = recent.allocated_bytes
    return held[held >= 0][-_RECENT_STEPS:].tolist() if held is not None else []


# Ranks.


def _by_rounded_mean(run: LiveRun) -> list[LiveRank]:
    """Sort the slowest first; ranks that take about the same time keep their places."""

    def place(rank: LiveRank) -> tuple[float, int]:
        times = rank.run.times
        return -float(_to_digits(np.array(times.mean_ms), 2)) if times else 0.0, rank.run.rank

    return sorted(run.ranks, key=place)


def _row(rank: LiveRank, recent: StepColumns, late: set[int], lines: Sequence[str]) -> LiveRow:
    name = rank_name(rank.run)
    times = rank.run.times
    stalled = sum(stall.share for stall in rank.run.stalls)
    quiet = long_duration(1e9 * rank.quiet_s) if rank.quiet_s is not None else "-"
    return LiveRow(
        cells=[
            name,
            f"{rank.run.steps:,}",
            or_dash(rank.recent_steps_per_s, significant),
            milliseconds(times.mean_ms) if times else "-",
            milliseconds(times.p99_ms) if times else "-",
            percent(stalled) if times else "-",
            or_dash(rank.memory_bytes, size),
            f"{quiet} ago" if rank.quiet_s is not None else "-",
        ],
        tone="late" if rank.run.rank in late else "",
        line=lines.index(name) if name in lines else None,
        spark=_rounded(recent.step_ns[-_SPARK_STEPS:] / 1e6),
    )


# Ask a running job for a window now, and see what became of the last request.

WindowState = Literal[
    "asked",  # no rank has seen the request yet
    "unanswered",  # for so long that none will
    "planned",
    "recording",
    "saving",
    "recorded",
    "refused",
    "missed",  # the job ended before its trace was there
]
PENDING = frozenset({"asked", "planned", "recording", "saving"})
_PATIENCE_S = 60.0
_STEPS_TO_SAVE = 1000


class AskedWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The last request, and what became of it."""

    state: WindowState
    words: str

    @property
    def is_pending(self) -> bool:
        return self.state in PENDING


class _Request(msgspec.Struct, frozen=True):
    id: str = ""
    asked_unix: float = 0.0


class _Plan(msgspec.Struct, frozen=True):
    first: int = 0
    warmup: int = 0
    active: int = 1
    refused: str | None = None

    @property
    def first_active(self) -> int:
        return self.first + self.warmup

    @property
    def last(self) -> int:
        return self.first_active + self.active - 1

    @property
    def steps(self) -> str:
        if self.active == 1:
            return f"step {self.last:,}"
        return f"steps {self.first_active:,} to {self.last:,}"


def ask_for_window(followed: FollowedRun, now: float) -> str:
    """Return the request's id. UsageError where no window can come, or one is coming already."""
    if not _training(followed):
        has_ranks = "has ended" if followed.ranks else "has not ended a step yet"
        raise UsageError(f"no window: the job {has_ranks}")
    before = last_asked_window(followed, now)
    if before is not None and before.is_pending:
        raise UsageError(f"a window is on its way: {before.words}")
    request = secrets.token_hex(8)
    content = {"schema": REQUEST_SCHEMA, "id": request, "asked_unix": now}
    try:
        write_json(followed.folder / REQUEST_FILE, content)
    except OSError as error:
        raise UsageError(f"{followed.folder} cannot be written: {why_refused(error)}") from None
    return request


def last_asked_window(followed: FollowedRun, now: float) -> AskedWindow | None:
    """Return None if nobody asked for a window."""
    request = read_record(followed.folder / REQUEST_FILE, _Request, Oddities(REQUEST_FILE))
    if request is None or not REQUEST_ID.fullmatch(request.id):
        return None
    name = plan_name(request.id)
    plan = read_record(followed.folder / name, _Plan, Oddities(name))
    has_ended = not _training(followed)
    waited_s = now - request.asked_unix
    if plan is not None and not plan.refused:
        return _planned(plan, followed, waited_s, has_ended=has_ended)
    if plan is not None:
        return AskedWindow(state="refused", words=f"refused: {plan.refused}")
    if has_ended:
        return AskedWindow(state="missed", words="the job ended before the window")
    if waited_s > _PATIENCE_S:
        words = "no rank has answered: the ranks run without stepscope, or in another folder"
        return AskedWindow(state="unanswered", words=words)
    return AskedWindow(state="asked", words="requested; the ranks choose the steps")


def _planned(
    plan: _Plan, followed: FollowedRun, waited_s: float, *, has_ended: bool
) -> AskedWindow:
    ranks, name = len({rank.rank for rank in followed.ranks}), step_trace(plan.first_active)
    folders = {rank.folder_name: rank.rank for rank in followed.ranks}  # of whichever attempt
    with_trace = [folder for folder in folders if (followed.folder / folder / name).is_file()]
    traces = len({folders[folder] for folder in with_trace})
    if traces:
        of = counted(ranks, "rank") if traces >= ranks else f"{traces:,} of {ranks:,} ranks"
        return AskedWindow(state="recorded", words=f"{plan.steps} recorded on {of}")
    if has_ended:
        return AskedWindow(state="missed", words=f"the job ended before {plan.steps} were saved")
    numbers = [rank.steps.recent.number for rank in _training(followed)]
    now = min((int(one[-1]) if len(one) else -1 for one in numbers), default=-1) + 1
    if now < plan.first:
        return AskedWindow(state="planned", words=f"{plan.steps} will be recorded")
    if now <= plan.last:
        return AskedWindow(state="recording", words=f"recording {plan.steps}")
    if waited_s > _PATIENCE_S and now > plan.last + _STEPS_TO_SAVE:
        words = f"{plan.steps} left no trace: `problems` in rank.json may say why"
        return AskedWindow(state="missed", words=words)
    return AskedWindow(state="saving", words=f"saving {plan.steps}")


def _training(followed: FollowedRun) -> list[FollowedRank]:
    """Those of a host that cannot be seen from here may train."""
    return [rank for rank in followed.ranks if rank.state in ("running", "unknown")]
