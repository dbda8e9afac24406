"""The whole run: every step of every rank, its stalls, and where the wall time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.explain.host_calls import is_library_frame
from stepscope.explain.whole_run.stall_stacks import (
    FEWEST_SAMPLES,
    compare_lines,
    merge_differences,
)
from stepscope.records.run import RankRun, StallCause, WholeRun
from stepscope.records.source_lines import LineDifference, Place, StackDifference
from stepscope.text.figures import interval, long_duration, milliseconds, percent
from stepscope.text.words import counted
from stepscope.ui.html.pane import Pane, ReportData, encode_block
from stepscope.ui.html.run_points import (
    MOST_ACCOUNTS,
    RunPoints,
    StallRow,
    account_bar,
    account_bars,
    drawable,
    encode_run,
    mean_of,
    on_one_clock,
    rank_names,
    stall_rows,
)
from stepscope.ui.words import STALLS

if TYPE_CHECKING:
    from stepscope.ui.html.pane import Column

# Why steps stall: for each cause, stacks in stalled steps against those in typical ones.
#
# A flame graph's widths are the time in a stalled step; stall_flames.js colours it by how much more
# that is than in a typical one.

_ROOT = "a stalled step"
_MOST_LINES = 2  # that the sentence names
_LEAST_LEFT_OUT = 0.005  # of the time
NOT_SAMPLED = (
    f"Not sampled: fewer than {FEWEST_SAMPLES} stacks were seen in steps that stalled for this. "
    "Rare or short stalls need a longer run."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceTree:
    """Stacks as columns, a parent before its children; times of one step, in ns."""

    parent: list[int]  # -1 for the root
    frame: list[Place | None]  # None for the root
    stalled_ns: list[int]
    typical_ns: list[int]
    self_ns: list[int]  # in stalled steps, with no frame inside
    samples: list[int]  # in stalled steps


def stall_reasons(
    ranks: Sequence[RankRun], rows: Sequence[StallRow]
) -> tuple[list[dict[str, Any]], str]:
    """What stands above each cause's flame graph, and the graphs' data block (empty: none)."""
    several = len({rank.rank for rank in ranks}) > 1
    merged = {}
    for row in rows:
        stacks = [one for rank in ranks for one in rank.stacks if one.cause == row.cause]
        merged[row.cause] = merge_differences(stacks) if stacks else None
    reasons = [_reason(row, merged[row.cause], several=several) for row in rows]
    known = {cause: difference for cause, difference in merged.items() if difference is not None}
    return reasons, _encode(known) if known else ""


def build_tree(difference: StackDifference) -> DifferenceTree:
    """Merge stacks that begin alike. The root is the whole step: what is left out stays blank."""
    tree = DifferenceTree(
        parent=[-1], frame=[None], stalled_ns=[0], typical_ns=[0], self_ns=[0], samples=[0]
    )
    places: dict[tuple[int, Place], int] = {}
    for stack in difference.stacks:
        stalled = round(stack.stalled * difference.stalled_ms * 1e6)
        typical = round(stack.typical * difference.typical_ms * 1e6)
        samples = round(stack.stalled * difference.stalled_samples)
        path = [0]
        for frame in stack.frames:
            key = (path[-1], frame)
            if key not in places:
                places[key] = len(tree.parent)
                tree.parent.append(path[-1])
                tree.frame.append(frame)
                for column in (tree.stalled_ns, tree.typical_ns, tree.self_ns, tree.samples):
                    column.append(0)
            path.append(places[key])
        for node in path:
            tree.stalled_ns[node] += stalled
            tree.typical_ns[node] += typical
            tree.samples[node] += samples
        tree.self_ns[path[-1]] += stalled
    tree.stalled_ns[0] = max(tree.stalled_ns[0], round(difference.stalled_ms * 1e6))
    tree.typical_ns[0] = max(tree.typical_ns[0], round(difference.typical_ms * 1e6))
    tree.samples[0] = difference.stalled_samples
    return tree


def _reason(row: StallRow, difference: StackDifference | None, *, several: bool) -> dict[str, Any]:
    words, about, left_out = NOT_SAMPLED, "", ""
    if difference is not None:
        words = describe_lines(compare_lines(difference))
        about = (
            f"{counted(difference.stalled_samples, 'sample')} in "
            f"{counted(difference.stalled_steps, 'stalled step')}, "
            f"{counted(difference.typical_samples, 'sample')} in typical ones"
            f"{'; all ranks together' if several else ''}"
        )
        rest = 1 - sum(stack.stalled for stack in difference.stacks)
        if rest > _LEAST_LEFT_OUT:
            left_out = f"Stacks of {percent(rest)} of the time are left out: they differ least."
    return {
        "cause": row.cause,
        "label": row.label,
        "words": words,
        "about": about,  # what the graph rests on
        "left_out": left_out,
        "sampled": difference is not None,  # otherwise there is no graph
    }


def describe_lines(lines: Sequence[LineDifference]) -> str:
    if not lines:
        return "No line of code runs clearly longer in stalled steps than in typical ones."
    first, *others = lines[:_MOST_LINES]
    also = "".join(f", and {_line_words(line)} for {_times(line)} more" for line in others)
    return (
        f"In stalled steps {_line_words(first)} runs for {_times(first)} more than in typical "
        f"ones{also}."
    )


def _times(line: LineDifference) -> str:
    return f"{milliseconds(line.more_ms)} ({interval(line.low_ms, line.high_ms)})"


def _line_words(line: LineDifference) -> str:
    place = line.place
    name = place.file.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{name}:{place.line} {place.function}".strip()


def _encode(differences: Mapping[StallCause, StackDifference]) -> str:
    """As FlameTree reads them; `kind` is 1 for the user's own code."""
    names: dict[str, int] = {}
    columns: dict[str, Column] = {}
    for cause, difference in differences.items():
        tree = build_tree(difference)
        texts = [
            _ROOT if frame is None else f"{frame.file}({frame.line}): {frame.function}"
            for frame in tree.frame
        ]
        lists = {
            "parent": [parent + 1 for parent in tree.parent],
            "name": [names.setdefault(text, len(names)) for text in texts],
            "kind": [frame is not None and not is_library_frame(frame) for frame in tree.frame],
            "count": tree.samples,
            "total": tree.stalled_ns,
            "self": tree.self_ns,
            "typical": tree.typical_ns,
        }
        columns |= {f"{cause}_{key}": np.array(values, np.int64) for key, values in lists.items()}
    return encode_block({"strings": list(names)}, columns)


def run_view(report: ReportData) -> dict[str, Any] | None:
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
    return {
        "summary": run_summary(run, rows),
        "facts": _facts(run, points.middle_us),
        "payload": points.payload,
        "names": rank_names(drawable(run.ranks)),  # of the series, in their order
        "all_name": _all_name(run),
        "causes": [(cause, *words) for cause, words in STALLS.items() if cause in known],
        "stalls": rows,
        "reasons": reasons,
        "flames": flames,
        "several": len({rank.rank for rank in run.ranks}) > 1,
        "account": account_bar(run.account, "Wall time of the command") if run.account else None,
        "accounts": accounts,  # of the ranks, if they differ
        "accounts_left_out": max(0, many_accounts - MOST_ACCOUNTS) if accounts else 0,
        "goodput": _goodput(run),
        "notes": _notes(run, points),
    }


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
