"""The whole run: every step of every rank, its stalls, and where the wall time went."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.figures import interval, long_duration, milliseconds, percent
from stepscope.ui.html.pane import Pane, ReportData
from stepscope.ui.html.run_points import encode_run, on_one_clock
from stepscope.ui.html.run_tables import (
    MOST_ACCOUNTS,
    account_bar,
    account_bars,
    drawable,
    mean_of,
    rank_names,
    stall_rows,
)
from stepscope.ui.html.stall_flames import stall_reasons
from stepscope.ui.words import STALLS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.whole_run import StallCause, WholeRun
    from stepscope.ui.html.run_points import RunPoints
    from stepscope.ui.html.run_tables import AccountBar, StallRow
    from stepscope.ui.html.stall_flames import StallReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    summary: str
    facts: list[tuple[str, str, str]]  # label, value, hint
    payload: str
    names: list[str]  # of the series, in their order
    all_name: str
    causes: list[tuple[StallCause, str, str]]  # that some step stalled for: id, label, hint
    stalls: list[StallRow]
    reasons: list[StallReason]  # of these stalls
    flames: str  # their data block, empty where nothing was sampled
    several: bool  # ranks
    account: AccountBar | None
    accounts: list[AccountBar]  # of the ranks, if they differ
    accounts_left_out: int
    goodput: str
    notes: list[str]


def run_view(report: ReportData) -> RunView | None:
    run = report.explanation.run
    job = report.explanation.job
    points = encode_run(on_one_clock(run.ranks, job)) if run is not None else None
    if run is None or points is None:
        return None
    rows = stall_rows(run.ranks)
    reasons, flames = stall_reasons(run.ranks, rows)
    accounts = account_bars(run.ranks)
    many_accounts = sum(rank.account is not None for rank in run.ranks)
    known = {row.cause for row in rows}
    return RunView(
        summary=run_summary(run, rows),
        facts=_facts(run, points.middle_us),
        payload=points.payload,
        names=rank_names(drawable(run.ranks)),
        all_name=_all_name(run),
        causes=[(cause, *words) for cause, words in STALLS.items() if cause in known],
        stalls=rows,
        reasons=reasons,
        flames=flames,
        several=len({rank.rank for rank in run.ranks}) > 1,
        account=account_bar(run.account, "Wall time of the command") if run.account else None,
        accounts=accounts,
        accounts_left_out=max(0, many_accounts - MOST_ACCOUNTS) if accounts else 0,
        goodput=_goodput(run),
        notes=_notes(run, points),
    )


def run_summary(run: WholeRun, rows: Sequence[StallRow]) -> str:
    """The mean step, the typical one, and what lies between them."""
    times = [rank.times for rank in run.ranks if rank.times is not None]
    if not times:
        return "The run has no steady steps: it ended during its warm-up."
    mean, typical = mean_of(run.ranks, "mean_ms"), mean_of(run.ranks, "typical_ms")
    begin = f"A step takes {milliseconds(mean)} on average"
    if not rows or (mean - typical) / mean < 0.005:
        vary = percent(mean_of(run.ranks, "variation"))
        return f"{begin}, without notable stalls. Steps vary by {vary}."
    most = rows[0]
    of_it = f", most of it {_cause_words(most)}" if len(rows) > 1 else f": {_cause_words(most)}"
    return (
        f"{begin}, {milliseconds(typical)} without stalls. Stalls cost "
        f"{milliseconds(mean - typical)} of every step ({percent((mean - typical) / mean)}){of_it}."
    )


def _cause_words(row: StallRow) -> str:
    return f"{row.label.lower().replace('gc ', 'GC ')} ({row.often})"


def _facts(run: WholeRun, middle_us: dict[str, float]) -> list[tuple[str, str, str]]:
    ranks = len({rank.rank for rank in run.ranks})
    attempts = max(rank.attempt for rank in run.ranks)
    steps: Counter[int] = Counter()
    for rank in run.ranks:
        steps[rank.rank] += rank.steps
    on = f"on each of {ranks:,} ranks" if ranks > 1 else ""
    tries = f"{attempts} attempts, one after another" if attempts > 1 else ""
    facts = [("Steps", f"{max(steps.values()):,}", ", ".join(filter(None, (on, tries))))]
    times = [rank.times for rank in run.ranks if rank.times is not None]
    if times:
        low, high = (min(t.low_ms for t in times), max(t.high_ms for t in times))
        mean = f"{interval(low, high)} ms" + (" over the ranks" if len(times) > 1 else "")
        ms = {name: milliseconds(us / 1e3) for name, us in middle_us.items()}
        facts += [
            ("Mean step", ms["mean"], mean),
            ("Median", ms["median"], "Half of the steps take longer"),
            ("99th percentile", ms["p99"], "1 step in 100 takes longer"),
            ("Longest", long_duration(max(t.longest_ms for t in times) * 1e6), ""),
        ]
    if run.account is not None:
        facts.append(("Wall time", long_duration(run.account.wall_ms * 1e6), ""))
        facts.append(("Goodput", percent(run.account.goodput), "Steady training over wall time"))
    return facts


def _goodput(run: WholeRun) -> str:
    if run.account is None:
        return ""
    whole = long_duration(run.account.wall_ms * 1e6)
    good = long_duration(run.account.goodput * run.account.wall_ms * 1e6)
    share = percent(run.account.goodput)
    return f"{good} of {whole} were steady training: a goodput of {share}."


def _notes(run: WholeRun, points: RunPoints) -> list[str]:
    notes = []
    if points.drawn < points.all_steps:
        notes.append(
            f"{points.drawn:,} of {points.all_steps:,} steps are drawn: the shortest and the "
            "longest of each stretch. Distribution, stalls and wall time cover all steps."
        )
    notes += run.account.notes if run.account else ()
    names = rank_names(run.ranks)
    notes += [
        f"{name}: {note}"
        for rank, name in zip(run.ranks, names, strict=True)
        for note in rank.notes
    ]
    return list(dict.fromkeys(notes))


def _all_name(run: WholeRun) -> str:
    ranks = len({rank.rank for rank in run.ranks})
    attempts = len({rank.attempt for rank in run.ranks})
    if attempts == 1:
        return f"All ranks ({ranks:,})"
    return f"All attempts ({attempts:,})" + (f", all ranks ({ranks:,})" if ranks > 1 else "")


PANE = Pane(id="run", title="Run", order=12, view=run_view)
