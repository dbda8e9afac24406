"""The explanation on one screen: verdict, why, next; the step as a bar; findings; what-ifs.

Whatever the input, at most `MOST_LINES` lines: texts are cut at their last line, lists say how many
more there are. Everything else is in explanation.py, which `--full` prints.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from stepscope.records.explanation import called
from stepscope.records.figures import interval, significant
from stepscope.records.words import counted
from stepscope.ui.terminal.console import make_console, text_line
from stepscope.ui.terminal.explanation import (
    COLOURS,
    FILLS,
    SEVERITY_STYLES,
    budget_bar,
)
from stepscope.ui.whatif import WORTH
from stepscope.ui.words import PARTS, one_line, short_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from stepscope.records.explanation import Advice, Budget, Explanation, Finding, Part, Place
    from stepscope.records.quality import Note

MOST_LINES = 24  # `run` adds one: where its folder is
_LABELS = 10  # columns
_VERDICT_LINES, _WHY_LINES, _NEXT_LINES, _LEGEND_LINES = 3, 2, 2, 2
_MOST_FINDINGS, _FEWEST_FINDINGS = 4, 2
_MOST_WHATIFS = 3
_VISIBLE = 0.005  # of the step
_FAINT = "bright_black"
# Notes that say an answer rests on less than it should, or may be wrong.
GRAVE = frozenset(
    {
        "clocks-contradict",
        "duplicate-ranks",
        "empty-rank",
        "left-out",
        "missing-parts",
        "missing-ranks",
        "mixed-worlds",
        "not-closed",
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
) -> None:
    """Print one screen; `more` is what to type to see all of it."""
    console = make_console(width, to_stderr=to_stderr)
    for line in short_lines(explanation, console, more=more, report=report):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def short_lines(
    explanation: Explanation, console: Console, *, more: str, report: Path | None
) -> list[Text]:
    """As many findings as the screen has room for."""
    for findings in range(_MOST_FINDINGS, _FEWEST_FINDINGS - 1, -1):
        lines = _lines(explanation, console, more, report, findings)
        if len(lines) <= MOST_LINES:
            break
    return lines


def _lines(
    explanation: Explanation, console: Console, more: str, report: Path | None, findings: int
) -> list[Text]:
    width = console.width
    style = f"bold {SEVERITY_STYLES[explanation.findings[0].severity]}"
    out = [_headline(explanation, width), Text()]
    out += _labelled("verdict", _wrapped(explanation.verdict, console, _VERDICT_LINES, style))
    out += _labelled("why", _wrapped(explanation.why, console, _WHY_LINES))
    out += _labelled("next", _wrapped(explanation.next, console, _NEXT_LINES))
    out += [Text(), *_where_it_went(explanation, width), Text()]
    out += _labelled("findings", _findings(explanation, width, findings))
    out += _labelled("what if", _what_ifs(explanation.advice, width))
    out += _labelled("notes", _notes(explanation, console))
    if report is not None:
        out += _labelled("report", [text_line(_clickable(report), "bold")])
    out += _labelled("more", [text_line(more, style=_FAINT)])
    return out


def _labelled(label: str, rows: Sequence[Text]) -> list[Text]:
    """A block: its name beside its first line."""
    return [
        Text.assemble((f"{label if place == 0 else '':<{_LABELS}}", _FAINT), row)
        for place, row in enumerate(rows)
    ]


def _wrapped(text: str, console: Console, most: int, style: str = "") -> list[Text]:
    """At most so many lines; one that is cut says so."""
    if not text:
        return []
    room = console.width - _LABELS
    lines = [Text(row.plain.rstrip(), style) for row in text_line(text).wrap(console, room)]
    if len(lines) > most:
        last = " ".join(line.plain for line in lines[most - 1 :])
        lines[most - 1 :] = [Text(_cut(last, room), style)]
    return lines


def _cut(text: str, room: int) -> str:
    """The beginning that fits, with a mark where something is missing."""
    text = one_line(text)
    if cell_len(text) <= room:
        return text
    return set_cell_size(text, max(1, room - 1)).rstrip() + "…"


def _headline(explanation: Explanation, width: int) -> Text:
    """Which input, which device, how much of it, and the step; a long name gives way."""
    first = explanation.ranks[0]
    facts = [first.device or first.kind.upper()]
    if first.memory is not None and first.memory.source == "snapshot":
        facts += ["memory snapshot", counted(first.events, "event")]
    else:
        if first.steps.steps:
            facts.append(counted(len(first.steps.steps), "step"))
        facts.append(_step(explanation))
    rest = " · ".join(facts)
    name = short_kernel(_name(explanation), max(12, width - cell_len(rest) - 3))
    return text_line(_cut(f"{name} · {rest}", width), style=_FAINT)


def _name(explanation: Explanation) -> str:
    if len(explanation.ranks) > 1:
        kind = explanation.ranks[0].called.partition(" ")[0]  # rank, or process
        return counted(len(explanation.ranks), kind, "processes" if kind == "process" else None)
    path = Path(explanation.ranks[0].path)
    in_run = path.parent.name.startswith("rank-") and path.parent.parent.name
    return path.parent.parent.name if in_run else path.name


def _step(explanation: Explanation) -> str:
    budget = explanation.budget
    if budget.basis == "window":
        return f"a window of {budget.step_ms:.2f} ms"
    return f"{budget.step_ms:.2f} ms a step, {_BASIS[budget.basis]}"


def _where_it_went(explanation: Explanation, width: int) -> list[Text]:
    """The step's bar and legend; of a file about memory alone, the peak."""
    memory = explanation.ranks[0].memory
    if memory is not None and memory.source == "snapshot":
        from stepscope.ui.memory import headline

        return _labelled("memory", [text_line(_cut(headline(memory), width - _LABELS))])
    return [budget_bar(explanation.budget, width), *_legend(explanation.budget, width)]


def _legend(budget: Budget, width: int) -> list[Text]:
    """Visible parts in the order of the bar; what has no room is summed, so that all add up."""
    parts = [part for part in budget.parts if part.share >= _VISIBLE]
    for shown in range(len(parts), 0, -1):
        kept = sorted(parts, key=lambda part: -part.share)[:shown]
        items = [_item(part) for part in budget.parts if part in kept]
        rest = [part for part in budget.parts if part not in kept]
        if sum(part.share for part in rest) >= _VISIBLE:
            items.append(_rest(rest))
        rows = _flow(items, width)
        if len(rows) <= _LEGEND_LINES:
            return rows
    return []


def _item(part: Part) -> Text:
    return Text.assemble(
        (f"{FILLS[part.id]} ", COLOURS[part.id]),
        f"{PARTS[part.id][0].lower()} {significant(part.ms)} ms ",
        (f"{part.share:.0%}", "bold" if part.share >= 0.1 else ""),
    )


def _rest(parts: Sequence[Part]) -> Text:
    ms, share = sum(part.ms for part in parts), sum(part.share for part in parts)
    return Text(f"rest {significant(ms)} ms {share:.0%}", style=_FAINT)


def _flow(items: Sequence[Text], width: int) -> list[Text]:
    """Beside each other, as many as a line holds."""
    rows: list[Text] = []
    for item in items:
        if rows and rows[-1].cell_len + 2 + item.cell_len <= width:
            rows[-1].append("  ").append_text(item)
        else:
            rows.append(item.copy())
    return rows


def _findings(explanation: Explanation, width: int, most: int) -> list[Text]:
    """A line each; "healthy" is what the verdict says already."""
    several = len(explanation.ranks) > 1
    grave = [finding for finding in explanation.findings if finding.id != "healthy"]
    shown = grave if len(grave) <= most else grave[: most - 1]
    rows = [
        _finding(
            finding,
            width - _LABELS,
            leads=finding is explanation.findings[0],
            whose=called(explanation.ranks, finding.rank) if several else "",
        )
        for finding in shown
    ]
    if len(shown) < len(grave):
        rows.append(Text(f"{len(grave) - len(shown)} more", style=_FAINT))
    return rows


def _finding(finding: Finding, width: int, *, leads: bool, whose: str) -> Text:
    """Its share and title, then where it is in the code or what to do, if the line has room.

    Why the leading one is there and what to do about it stands above already.
    """
    share = f"{finding.share:.0%}" if finding.share >= _VISIBLE else ""
    whose = f" ({whose})" if whose and finding.rank is not None else ""
    of = f", share of {finding.of}" if share and finding.of != "step" else ""
    row = Text(f"{share:>4}  ")
    row.append(_cut(f"{finding.title}{whose}{of}", width - 6), SEVERITY_STYLES[finding.severity])
    about = [words for place in finding.where[:1] for words in _place_words(place)]
    if not leads:
        about += [remedy.summary for remedy in finding.remedies[:1]] + list(finding.evidence[:1])
    fitting = (text for text in about if cell_len(text) <= width - row.cell_len - 2)
    return row.append(one_line(f"  {next(fitting, '')}".rstrip()), style=_FAINT)


def _place_words(place: Place) -> list[str]:
    """The longest first."""
    line = f"{place.file}:{place.line}"
    return [f"{line} {place.function}".rstrip(), line, f"{Path(place.file).name}:{place.line}"]


def _what_ifs(advice: Sequence[Advice], width: int) -> list[Text]:
    """The largest savings; where nothing helps, that is the answer."""
    helping = sorted((a for a in advice if a.verdict == "faster"), key=lambda a: -a.saved_ms)
    if not helping:
        words = (
            f"{counted(len(advice), 'change')} tried on this step: none saves {WORTH:.0%} or more"
        )
        return [Text(_cut(words, width - _LABELS), style=_FAINT)] if advice else []
    best = helping[:_MOST_WHATIFS]
    savings = [f"saves {significant(each.saved_ms)} ms" for each in best]
    between = [f"({interval(each.saved_low_ms, each.saved_high_ms)})" for each in best]
    rows = []
    for each, saving, ends in zip(best, savings, between, strict=True):
        row = Text(f"{saving:<{max(map(len, savings))}} {ends:<{max(map(len, between))}}  ")
        room = width - _LABELS - row.cell_len
        row.append(_cut(each.label, room))
        setting = f"  --set {each.setting}"
        if cell_len(each.label) + cell_len(setting) <= room:
            row.append(setting, style=_FAINT)
        rows.append(row)
    return rows


def _notes(explanation: Explanation, console: Console) -> list[Text]:
    """The first of each grave kind, one in two lines or two in a line each; the rest is counted."""
    notes = _all_notes(explanation)
    kinds = {note.id: f"{whose}{note.detail}" for whose, note in reversed(notes)}
    grave = [text for name, text in reversed(kinds.items()) if name in GRAVE][:2]
    rows = [
        line for text in grave for line in _wrapped(text, console, 3 - len(grave), style="yellow")
    ]
    left = len(notes) - len(grave)
    if left:
        words = counted(left, "more note" if grave else "note")
        rows.append(Text(f"{words} about the input: --full", style=_FAINT))
    return rows


def _all_notes(explanation: Explanation) -> list[tuple[str, Note]]:
    """With whose they are."""
    several = len(explanation.ranks) > 1
    own = [
        (f"{rank.called}: " if several else "", note)
        for rank in explanation.ranks
        for note in rank.quality
    ]
    return [*(("", note) for note in explanation.quality), *own]


def _clickable(report: Path) -> str:
    """Relative where the report lies below this folder, else absolute: terminals open both."""
    path = report.absolute()
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return os.fspath(path)
