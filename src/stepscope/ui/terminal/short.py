"""The explanation on one screen: verdict, why, next; the step as a bar; findings; what-ifs.

Never more than `MOST_LINES` lines: long texts are cut, long lists say how many more there are.
explanation.py prints everything else (`--full`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from stepscope.explain.findings import NO_LOSS, leads_all
from stepscope.explain.incomplete_ranks import covers_span, is_server_only
from stepscope.records.explanation import Advice, Budget, Explanation, Finding, called
from stepscope.text.figures import duration, milliseconds, percent, size, trimmed
from stepscope.text.words import counted
from stepscope.ui.terminal.console import (
    COLOURS,
    FAINT,
    FILLS,
    LABELS,
    SEVERITY_STYLES,
    budget_bar,
    cut,
    flow,
    labelled,
    make_console,
    text_line,
    wrapped,
)
from stepscope.ui.terminal.whole_run import run_line
from stepscope.ui.topics.device_use import batch_words, memory_headline
from stepscope.ui.topics.whatif import WORTH, together_line
from stepscope.ui.words import PARTS, applied_line, failed_line, one_line, short_kernel

MOST_LINES = 24  # `run` adds one: where its folder is
_VERDICT_LINES, _WHY_LINES, _NEXT_LINES, _LEGEND_LINES = 3, 2, 2, 2
_MOST_FINDINGS, _FEWEST_FINDINGS = 4, 2
_MOST_WHATIFS = 3
_VISIBLE = 0.005  # of the step
_OVERLAPS = 1.0  # of the step: more than that cannot be disjoint
# What a share that is not one of the step is a share of.
_WHOLES = {"memory": "memory", "work": "the ranks' work", "run": "the run"}
# Notes that make the answer doubtful.
GRAVE = frozenset(
    {
        "clocks-contradict",
        "duplicate-ranks",
        "empty-rank",
        "left-out",
        "missing-parts",
        "missing-ranks",
        "mixed-worlds",
        "no-step-marks",
        "not-closed",
        "same-part-twice",
        "still-running",
        "truncated",
        "unreadable-events",
    }
)
_BASIS = {"measured": "measured", "corrected": "estimated", "cycles": "profiled"}


def print_short(
    explanation: Explanation,
    *,
    more: str = "--full prints all tables; --html FILE a report",
    report: Path | None = None,
    width: int | None = None,
    to_stderr: bool = False,
    memory_limit: int | None = None,
) -> None:
    """Print one screen; `more` says how to see everything. With a limit, also what fits in it."""
    console = make_console(width, to_stderr=to_stderr)
    lines = short_lines(explanation, console, more=more, report=report, memory_limit=memory_limit)
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def short_lines(
    explanation: Explanation,
    console: Console,
    *,
    more: str,
    report: Path | None,
    memory_limit: int | None = None,
) -> list[Text]:
    """With as many findings as the screen has room for."""
    for findings in range(_MOST_FINDINGS, _FEWEST_FINDINGS - 1, -1):
        lines = _lines(explanation, console, more, report, findings, memory_limit)
        if len(lines) <= MOST_LINES:
            return lines
    # Empty lines make way for others, the last ones first.
    gaps = [place for place, line in enumerate(lines) if not line]
    removed = gaps[max(0, len(gaps) + MOST_LINES - len(lines)) :]
    return [line for place, line in enumerate(lines) if place not in removed]


def _lines(
    explanation: Explanation,
    console: Console,
    more: str,
    report: Path | None,
    findings: int,
    memory_limit: int | None,
) -> list[Text]:
    width = console.width
    style = f"bold {SEVERITY_STYLES[explanation.findings[0].severity]}"
    failed, applied = failed_line(explanation), applied_line(explanation.origin)
    out = labelled("failed", wrapped(failed, console, _WHY_LINES, "bold red"))
    out.append(_headline(explanation, width))
    if applied:
        out += labelled("with", [text_line(cut(applied, width - LABELS))])
    out.append(Text())
    out += labelled("verdict", wrapped(explanation.verdict, console, _VERDICT_LINES, style))
    out += labelled("why", wrapped(explanation.why, console, _WHY_LINES))
    out += labelled("next", wrapped(explanation.next, console, _NEXT_LINES))
    out += labelled("also", wrapped(explanation.also, console, _NEXT_LINES, FAINT))
    out += [Text(), *_where_it_went(explanation, width), Text()]
    out += labelled("findings", _findings(explanation, width, findings))
    out += labelled("what if", _what_ifs(explanation.advice, width))
    out += labelled("memory", _what_fits(explanation, memory_limit, console))
    out += labelled("notes", _notes(explanation, console))
    if report is not None:
        out += labelled("report", [text_line(_clickable(report), "bold")])
    # The page of the first finding and all numbers, on one line if both fit.
    why = f"stepscope why {explanation.findings[0].id}"
    both = f"{why} · {more}"
    rows = [both] if cell_len(both) <= width - LABELS else [why, more]
    return out + labelled("more", [text_line(row, style=FAINT) for row in rows])


def _headline(explanation: Explanation, width: int) -> Text:
    """Which input, which device, how much of it, and the step; a long name gives way."""
    first = explanation.ranks[0]
    facts = [first.device or first.kind.upper()]
    if first.memory is not None and first.memory.source == "snapshot":
        facts += ["memory snapshot", counted(first.events, "event")]
    elif is_server_only(first):
        facts = ["parameter server", counted(first.events, "event")]
    else:
        if first.steps.steps:
            found = " found by repetition" if first.steps.repeats else ""
            facts.append(f"{counted(len(first.steps.steps), 'step')}{found}")
        facts.append(_step(explanation))
    rest = " · ".join(facts)
    name = short_kernel(_name(explanation), max(12, width - cell_len(rest) - 3))
    return text_line(cut(f"{name} · {rest}", width), style=FAINT)


def _name(explanation: Explanation) -> str:
    if explanation.without_trace is not None:
        traced = len(explanation.ranks)
        everyone = counted(traced + explanation.without_trace.count, "rank")
        return f"{everyone}, {traced:,} traced"
    if len(explanation.ranks) > 1:
        kind = explanation.ranks[0].called.partition(" ")[0]  # rank, or process
        return counted(len(explanation.ranks), kind, "processes" if kind == "process" else None)
    path = Path(explanation.ranks[0].path)
    if is_server_only(explanation.ranks[0]):
        return path.parent.parent.name
    in_run = path.parent.name.startswith("rank-") and path.parent.parent.name
    return path.parent.parent.name if in_run else path.name


def _step(explanation: Explanation) -> str:
    budget = explanation.budget
    if covers_span(explanation):
        return f"{duration(budget.step_ms * 1e6)} without step marks"
    if budget.basis == "window":
        return f"a window of {milliseconds(budget.step_ms)}"
    beside = " beside other processes" if leads_all(explanation.findings[0]) else ""
    return f"{milliseconds(budget.step_ms)} a step, {_BASIS[budget.basis]}{beside}"


def _where_it_went(explanation: Explanation, width: int) -> list[Text]:
    """The step's bar and legend; the peak for a memory snapshot."""
    memory = explanation.ranks[0].memory
    if memory is not None and memory.source == "snapshot":
        return labelled("memory", [text_line(cut(memory_headline(memory), width - LABELS))])
    server = []
    if explanation.together is not None:
        words = together_line(explanation.together)
        server = labelled("server", [text_line(cut(words, width - LABELS))])
    if is_server_only(explanation.ranks[0]):
        return server
    bar = [budget_bar(explanation.budget, width), *_legend(explanation.budget, width), *server]
    line = run_line(explanation.run, width - LABELS) if explanation.run else None
    return bar if line is None else [*bar, *labelled("run", [line])]


def _what_fits(explanation: Explanation, limit: int | None, console: Console) -> list[Text]:
    """The largest batch within --memory-limit, or why it is not known."""
    if limit is None:
        return []
    memory = [rank.memory for rank in explanation.ranks if rank.memory is not None]
    fits = [one.largest_batch for one in memory if one.largest_batch is not None]
    if fits:
        return wrapped(batch_words(fits[0]), console, _NEXT_LINES)
    words = f"whether a batch fits in {size(limit)} is not known: the input has no memory of a step"
    return wrapped(f"{words}; stepscope run records it", console, _NEXT_LINES)


def _legend(budget: Budget, width: int) -> list[Text]:
    """Visible parts in the order of the bar; the rest is one sum, so that all add up."""
    parts = [part for part in budget.parts if part.share >= _VISIBLE]
    for shown in range(len(parts), 0, -1):
        largest = sorted(parts, key=lambda part: -part.share)[:shown]
        items = [
            Text.assemble(
                (f"{FILLS[part.id]} ", COLOURS[part.id]),
                f"{PARTS[part.id][0].lower()} {milliseconds(part.ms)} ",
                (percent(part.share), "bold" if part.share >= 0.1 else ""),
            )
            for part in budget.parts
            if part in largest
        ]
        rest = [part for part in budget.parts if part not in largest]
        ms, share = sum(part.ms for part in rest), sum(part.share for part in rest)
        if share >= _VISIBLE:
            items.append(Text(f"rest {milliseconds(ms)} {percent(share)}", style=FAINT))
        rows = flow(items, width)
        if len(rows) <= _LEGEND_LINES:
            return rows
    return []


def _findings(explanation: Explanation, width: int, most: int) -> list[Text]:
    """One line per finding, without one that says that nothing was found: it is the verdict."""
    several = len(explanation.ranks) > 1
    findings = [finding for finding in explanation.findings if finding.id not in NO_LOSS]
    shown = findings if len(findings) <= most else findings[: most - 1]
    # The one that leads, then shares of a step, the largest first, then shares of other things.
    shown = [*shown[:1], *sorted(shown[1:], key=lambda one: (not _is_of_step(one), -one.share))]
    rows = [
        _finding(
            finding,
            width - LABELS,
            leads=finding is explanation.findings[0],
            whose=called(explanation.ranks, finding.rank) if several else "",
        )
        for finding in shown
    ]
    more = f"{len(findings) - len(shown)} more" if len(shown) < len(findings) else ""
    of_step = [finding.share for finding in shown if _is_of_step(finding)]
    if len(of_step) > 1 and sum(of_step) > _OVERLAPS:
        own = "each rank's own step" if several else "the step"
        more = f"{more}; " * bool(more) + f"shares of {own}: they overlap, and do not add up"
    return [*rows, Text(cut(more, width - LABELS), style=FAINT)] if more else rows


def _is_of_step(finding: Finding) -> bool:
    return finding.of in ("step", "trace")


def _finding(finding: Finding, width: int, *, leads: bool, whose: str) -> Text:
    """Share of the step and title, then the line of code or what to do, if there is room. A share
    of something else stands behind the title.

    The first lines already say what to do about the leading finding.
    """
    known = percent(finding.share) if finding.share >= _VISIBLE else ""
    share = known if _is_of_step(finding) else ""
    whose = f" ({whose})" if whose and finding.rank is not None else ""
    of = f", {known} of {_WHOLES[finding.of]}" if known and not _is_of_step(finding) else ""
    row = Text(f"{share:>4}  ")
    row.append(cut(f"{finding.title}{whose}{of}", width - 6), SEVERITY_STYLES[finding.severity])
    about = []
    for place in finding.where[:1]:  # the longest first
        line = f"{place.file}:{place.line}"
        short = f"{Path(place.file).name}:{place.line}"
        about += [f"{line} {place.function}".rstrip(), line, short]
    if not leads:
        about += [remedy.summary for remedy in finding.remedies[:1]] + list(finding.evidence[:1])
    fitting = (text for text in about if cell_len(text) <= width - row.cell_len - 2)
    return row.append(one_line(f"  {next(fitting, '')}".rstrip()), style=FAINT)


def _what_ifs(advice: Sequence[Advice], width: int) -> list[Text]:
    """The largest gains, those that are sure first; or that nothing helps."""
    promising = (a for a in advice if a.verdict == "faster" or (a.tried and a.tried.kept))
    known = [a for a in promising if a.tried or a.gain.is_known]
    helping = sorted(known, key=lambda a: (not a.gain.is_sure, -a.saved_ms))
    if not helping:
        changes = counted(len(advice), "change")
        words = f"{changes} predicted: none saves {trimmed(percent(WORTH))} or more"
        return [Text(cut(words, width - LABELS), style=FAINT)] if advice else []
    measured = [change.tried for change in helping if change.tried is not None][:_MOST_WHATIFS]
    rows = [Text(cut(f"{tried.label}: {tried.words}", width - LABELS)) for tried in measured]
    best = [change for change in helping if change.tried is None][: _MOST_WHATIFS - len(rows)]
    gains = [" ".join(filter(None, change.gain.words())) for change in best]
    for change, gain in zip(best, gains, strict=True):
        row = Text(f"{gain:<{max(map(len, gains))}}  ")
        # How to ask for it never gives way: it has the next line, if need be.
        setting = f"--set {change.setting}"
        left = width - LABELS - row.cell_len
        if cell_len(change.label) + 2 + cell_len(setting) <= left:
            rows.append(row.append(change.label).append(f"  {setting}", style=FAINT))
        elif cell_len(setting) <= left:
            rows.append(row.append(setting, style=FAINT))
        else:
            rows += [row.append(cut(change.label, left)), Text(f"  {setting}", style=FAINT)]
    return rows


def list_notes(explanation: Explanation) -> list[tuple[str, str]]:
    """Return all notes about the input: id, and the sentence with whose it is."""
    several = len(explanation.ranks) > 1
    notes = [(note.id, note.detail) for note in explanation.quality]
    return notes + [
        (note.id, f"{rank.called}: {note.detail}" if several else note.detail)
        for rank in explanation.ranks
        for note in rank.quality
    ]


def grave_notes(notes: Sequence[tuple[str, str]]) -> list[str]:
    """Return what puts the answer in doubt: the first note of each kind, two at most."""
    kinds = {name: text for name, text in reversed(notes) if name in GRAVE}
    return list(reversed(kinds.values()))[:2]


def _notes(explanation: Explanation, console: Console) -> list[Text]:
    """Show the first grave note of each kind, two at most; then the last one left, or a count."""
    notes = list_notes(explanation)
    kinds = dict(reversed(notes))
    grave = grave_notes(notes)
    rows = [
        line for text in grave for line in wrapped(text, console, 3 - len(grave), style="yellow")
    ]
    left = len(notes) - len(grave)
    if len(notes) == 1 and not grave:
        return wrapped(next(iter(kinds.values())), console, 2, style=FAINT)
    if left == 1 and (others := [kinds[name] for name in kinds if name not in GRAVE]):
        rows += wrapped(others[0], console, 1, style=FAINT)
    elif left:
        words = counted(left, "more note" if grave else "note")
        rows.append(Text(f"{words} about the input: --full", style=FAINT))
    return rows


def _clickable(report: Path) -> str:
    """Relative if the report lies below this folder, else absolute: terminals open both."""
    path = report.absolute()
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return os.fspath(path)
