"""Write the page of a bench: where it was measured, all workloads side by side, their memory
and time as stacks, and every number in a table.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from stepscope.bench.against import compare_results
from stepscope.bench.results import BenchComparison, BenchMachine, BenchResults, WorkloadResult
from stepscope.explain.memory.model import LABELS
from stepscope.records.memory import CATEGORIES
from stepscope.text.figures import long_duration, milliseconds, percent, significant, size
from stepscope.text.words import counted, sentence
from stepscope.ui.bench.words import (
    against_answer,
    against_notes,
    bench_answer,
    rerun_words,
    row_name,
)
from stepscope.ui.html.bench_charts import draw_bench_roofline, scaling_figures
from stepscope.ui.html.bench_rows import (
    bench_rows,
    compared_columns,
    distinctions,
    earlier_rows,
    short_name,
    shown_metrics,
)
from stepscope.ui.html.render import json_block, make_table, render_page, slice_of, write_atomically
from stepscope.ui.words import PARTS, one_line

STYLES = ("report.css", "efficiency.css", "memory.css", "bench.css")


def write_bench_page(
    results: BenchResults,
    path: Path,
    against: BenchResults | None = None,
    comparison: BenchComparison | None = None,
) -> None:
    """`against`: saved results that each workload is shown beside.

    `comparison` is of both, where it has been made already.
    """
    if against is not None and comparison is None:
        comparison = compare_results(against, results, "the saved results")
    measured = {
        str(place): result
        for place, result in enumerate(results.workloads)
        if result.status == "measured"
    }
    view = _view(results, measured, against, comparison)
    sections = {
        "workloads": ("Workloads", view["rows"]),
        "roofline": ("Roofline", view["roofline"]),
        "budget": ("Step", view["budget"]),
        "memory": ("Memory", view["memory"]),
        "losses": ("Losses", view["losses"]),
        "scaling": ("Scaling", view["scaling"]),
        "tables": ("Numbers", view["rows"]),
    }
    page = render_page(
        "bench_page.html.j2",
        styles=STYLES,
        scripts=["bench_page"],
        title=view["answer"].verdict,
        links=[(id_, title) for id_, (title, there) in sections.items() if there],
        **view,
    )
    write_atomically(path, page)


def _view(
    results: BenchResults,
    measured: Mapping[str, WorkloadResult],
    against: BenchResults | None,
    comparison: BenchComparison | None,
) -> dict[str, Any]:
    before = earlier_rows(measured, against)
    compared = compared_columns(measured, comparison)
    rows = bench_rows(measured, before, compared)
    facts = machine_facts(results.machine) if results.machine else []
    facts.append(("Measured", when_words(results.started_unix)))
    if against is not None:
        facts.append(("Compared with results of", when_words(against.started_unix)))
    verdicts = {row.verdict for row in comparison.workloads} if comparison else set()
    changes = {key: comparison.workloads[int(key)].counted_change for key in measured if comparison}
    abouts = distinctions(results.workloads)
    return {
        "answer": bench_answer(results),
        "facts": [*facts, ("stepscope", one_line(results.stepscope))],
        "rules": rules_words(results),
        "broken": [one_line(rule) for rule in results.broken_rules],
        "command": shlex.join(map(one_line, results.command)),
        "unmeasured": [
            {
                "name": short_name(result.name),
                "about": about or one_line(result.size),
                "status": result.status,
                "why": one_line(result.why or "the reason is not known"),
            }
            for result, about in zip(results.workloads, abouts, strict=True)
            if result.status != "measured"
        ],
        "metrics": shown_metrics(list(measured.values())),
        "rows": rows,
        "compared": compared,
        "before": "" if not before else "before" if against else "without changes",
        "against": against_answer(comparison) if comparison else None,
        "against_tone": "bad"
        if "slower" in verdicts
        else "good"
        if "faster" in verdicts
        else "still",
        "against_notes": list(map(one_line, against_notes(comparison))) if comparison else [],
        "notes": [
            f"{one_line(row_name(row))}: {one_line(note)}"
            for row in measured.values()
            for note in row.notes
        ],
        "again": rerun_words(results),
        "verdicts": any(row.verdict for row in rows),
        "roofline": draw_bench_roofline(measured, results.machine),
        "budget": budget_chart(measured),
        "memory": memory_chart(measured),
        "losses": loss_rows(measured),
        "scaling": scaling_figures(results.scaling),
        "data": Markup(json_block({"tables": [numbers_table(measured, changes)]})),
    }


# The head of a bench's page: where and by which rules it was measured.

# A rule's name -> its value in words; other rules are printed as they are.
_RULES: dict[str, Callable[[object], str]] = {
    "runs": lambda runs: f"{counted(runs, 'run')} each" if isinstance(runs, int) else str(runs),
    "runs_for_a_claim": lambda runs: f"a claim needs {runs}",
    "dropped": lambda many: (
        f"{many or 'none'} dropped" + (" (fastest, slowest)" if many == 2 else "")
    ),
    "interleaved": lambda yes: "runs take turns" if yes else "runs do not take turns",
    "seed": lambda seed: f"seed {seed}",
}


def rules_words(results: BenchResults) -> str:
    """5 runs each; dropped: 2; seed 0."""
    words = [
        _RULES[name](value) if name in _RULES else f"{name.replace('_', ' ')}: {value}"
        for name, value in results.rules.items()
    ]
    return one_line(sentence("; ".join(words)))


def machine_facts(machine: BenchMachine) -> list[tuple[str, str]]:
    """Names and values, without what is not known."""
    versions = [
        f"{name} {version}"
        for name, version in (
            ("torch", machine.torch),
            ("CUDA", machine.cuda),
            ("Python", machine.python),
        )
        if version
    ]
    many = f"{machine.devices} × " if machine.devices > 1 else ""
    facts = [
        ("Device", f"{many}{machine.device}" if machine.device else "none, on the CPU"),
        ("Processor", f"{machine.processor}, {counted(machine.cores, 'core')}"),
        ("Host", machine.host),
        ("Software", ", ".join(versions)),
        ("Clocks", _clocks(machine)),
        (
            "Load of other programs",
            "" if machine.load is None else f"{significant(machine.load)} cores",
        ),
    ]
    return [(name, one_line(value)) for name, value in facts if value]


def _clocks(machine: BenchMachine) -> str:
    """sm 1,980 -> 1,965 MHz, where it was read before and after."""
    names = dict.fromkeys(name.rpartition("_")[0] or name for name in machine.clocks)
    words = []
    for name in names:
        ends = [machine.clocks.get(f"{name}_{when}") for when in ("before", "after")]
        known = [significant(mhz) for mhz in (*ends, machine.clocks.get(name)) if mhz is not None]
        words.append(f"{name} {' -> '.join(known)} MHz")
    return ", ".join(words)


def when_words(started_unix: float) -> str:
    """2026-11-16 15:04 UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started_unix))


# What a bench's workloads hold in memory and spend their steps on: one stacked bar each.

_LEAST_SHARE = 1e-4  # thinner pieces cannot be seen


class StackPiece(NamedTuple):
    look: str  # classes of its colour
    share: float
    tip: str


class WorkloadStack(NamedTuple):
    """One workload's bar: `share` is its length where bars are drawn to one scale."""

    key: str
    name: str
    about: str
    total: str
    share: float
    pieces: list[StackPiece]


class StackChart(NamedTuple):
    id: str
    title: str
    caption: str
    to_scale: str  # the name of the view in which lengths are amounts
    key: tuple[tuple[str, str, str], ...]  # look, label, hint
    stacks: list[WorkloadStack]


class LossRow(NamedTuple):
    """From the first loss to the last; places are percentages of the track's width."""

    key: str
    name: str
    about: str
    first_at: float
    last_at: float
    target_at: float | None
    tone: str  # reached, missed or unknown
    words: str
    outcome: str
    tip: str


def memory_chart(measured: Mapping[str, WorkloadResult]) -> StackChart | None:
    """None where no workload has its memory by category."""
    looks = {name: (f"m-{name}", LABELS[name], "") for name in CATEGORIES}
    stacks = _stacks(
        {key: result.memory for key, result in measured.items()}, measured, looks, size
    )
    if stacks is None:
        return None
    caption = "Bytes at the moment of the peak, by their use."
    return StackChart("memory", "What is in memory at the peak", caption, "bytes", *stacks)


def budget_chart(measured: Mapping[str, WorkloadResult]) -> StackChart | None:
    """None where no workload's step was divided."""
    looks = {}
    for name in PARTS:
        part = slice_of(name)
        pattern = " is-idle" if part.idle else " is-stall" if part.stall else ""
        looks[name] = (f"bg-{part.color}{pattern}", part.label, part.hint)
    amounts = {key: result.budget_ms for key, result in measured.items()}
    stacks = _stacks(amounts, measured, looks, milliseconds)
    if stacks is None:
        return None
    caption = "The parts add up to the step. Striped: the device is idle."
    return StackChart("budget", "Where the step goes", caption, "milliseconds", *stacks)


_Look = tuple[str, str, str]


def _stacks(
    amounts: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, WorkloadResult],
    looks: Mapping[str, _Look],
    words: Callable[[float], str],
) -> tuple[tuple[_Look, ...], list[WorkloadStack]] | None:
    """The looks that occur, and a bar for each workload that has any amount."""
    amounts = {key: parts for key, parts in amounts.items() if any(parts.values())}
    if not amounts:
        return None
    wholes = {
        key: sum(amount for amount in parts.values() if amount > 0)
        for key, parts in amounts.items()
    }
    used = {name for parts in amounts.values() for name, amount in parts.items() if amount > 0}
    known = {name: look for name, look in looks.items() if name in used}
    # Parts that a later version of stepscope wrote down come last.
    known |= {name: ("bg-other", one_line(name), "") for name in sorted(used - looks.keys())}
    abouts = distinctions([measured[key] for key in amounts])
    stacks = []
    for (key, parts), about in zip(amounts.items(), abouts, strict=True):
        pieces = []
        for name, (look, label, hint) in known.items():
            amount = parts.get(name, 0.0)
            if amount >= _LEAST_SHARE * wholes[key]:
                share = amount / wholes[key]
                lines = [f"{label}: {words(amount)}, {percent(share)}", *([hint] if hint else [])]
                pieces.append(StackPiece(look, share, "\n".join(lines)))
        name, whole = short_name(measured[key].name), wholes[key]
        share = whole / max(wholes.values())
        stacks.append(WorkloadStack(key, name, about, words(whole), share, pieces))
    return tuple(known.values()), stacks


def loss_rows(measured: Mapping[str, WorkloadResult]) -> list[LossRow]:
    """Workloads whose first and last loss are known. Each has a scale of its own."""
    known = {
        key: (result, result.loss_first, result.loss_last)
        for key, result in measured.items()
        if result.loss_first is not None and result.loss_last is not None
    }
    abouts = distinctions([result for result, _, _ in known.values()])
    rows = []
    for (key, (result, first, last)), about in zip(known.items(), abouts, strict=True):
        target = result.target_loss
        at = _places([value for value in (first, last, target) if value is not None])
        words = f"{significant(first)} → {significant(last)}"
        rows.append(
            LossRow(
                key=key,
                name=short_name(result.name),
                about=about,
                first_at=at(first),
                last_at=at(last),
                target_at=None if target is None else at(target),
                tone={True: "reached", False: "missed", None: "unknown"}[result.target_reached],
                words=words,
                outcome=_outcome(result),
                tip=f"Loss {words}" + ("" if target is None else f"\ntarget {significant(target)}"),
            )
        )
    return rows


def _places(values: Sequence[float]) -> Callable[[float], float]:
    """From zero, or from the least where losses are negative, to the largest.

    A loss that is no longer a number lies at the far end.
    """
    finite = [0.0, *(value for value in values if math.isfinite(value))]
    low, high = min(finite), max(finite)
    width = (high - low) or 1.0
    return lambda value: 2 + 96 * ((value - low) / width if math.isfinite(value) else 1.0)


def _outcome(result: WorkloadResult) -> str:
    if result.target_reached is None:
        return "not known" if result.target_loss is not None else "no target"
    if not result.target_reached:
        return "not reached"
    words = "reached"
    if result.steps_to_target is not None:
        words += f" in {counted(result.steps_to_target, 'step')}"
    if result.time_to_target_s is not None:
        words += f", {long_duration(result.time_to_target_s * 1e9)}"
    return words


# Every number of a bench, as a table that can be sorted and filtered.

# heading and type -> the number
_COLUMNS: dict[str, Callable[[WorkloadResult], Any]] = {
    "Workload:text": lambda row: one_line(row.name),
    "Size:text": lambda row: one_line(row.size),
    "Ranks:count": lambda row: row.ranks,
    "Batch:count": lambda row: _number(row.settings.get("batch")),
    "Changes:text": lambda row: one_line(" + ".join(row.remedies)),
    "Samples/s:number": lambda row: row.samples_per_s,
    "from:number": lambda row: row.low,
    "to:number": lambda row: row.high,
    "Step:ns": lambda row: _ns(row.step_ms, 1e6),
    "Busy:share": lambda row: row.busy,
    "MFU:share": lambda row: row.mfu,
    "CPU:share": lambda row: row.cpu,
    "Peak memory:bytes": lambda row: row.peak_bytes,
    "predicted:bytes": lambda row: row.predicted_peak_bytes,
    "FLOPs of a step:flops": lambda row: row.flops,
    "Bytes of a step:bytes": lambda row: row.bytes_moved,
    "First loss:number": lambda row: row.loss_first,
    "Last loss:number": lambda row: row.loss_last,
    "Target:number": lambda row: row.target_loss,
    "Steps to it:count": lambda row: row.steps_to_target,
    "Time to it:ns": lambda row: _ns(row.time_to_target_s, 1e9),
    "Runs:count": lambda row: len(row.runs_ms) or None,
}


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None


def _ns(time: float | None, unit: float) -> float | None:
    return None if time is None else time * unit


def numbers_table(
    measured: Mapping[str, WorkloadResult], changes: Mapping[str, float | None]
) -> dict[str, Any]:
    """`changes` of the step are by key; empty where nothing is compared.

    Each kind of compute share and counter that any workload has is a column too.
    """
    results = measured.values()
    shares = list(dict.fromkeys(name for row in results for name in row.compute_share))
    counters = list(dict.fromkeys(name for row in results for name in row.counters))
    has_speedup = any(row.speedup for row in results)
    more = ["Change of the step:change"] if changes else []
    more += ["Times as fast:times"] if has_speedup else []
    more += [f"{_plain(name)} peak:share" for name in shares]
    more += [f"{_plain(name)}:share" for name in counters]
    columns = " | ".join([*_COLUMNS, *more, "All runs took:ns"])
    rows = [
        (
            *(words(result) for words in _COLUMNS.values()),
            *([changes.get(key)] if changes else []),
            *([result.speedup] if has_speedup else []),
            *map(result.compute_share.get, shares),
            *map(result.counters.get, counters),
            _ns(result.seconds, 1e9),
        )
        for key, result in measured.items()
    ]
    return make_table("Workloads", columns, rows, sort=-1)


def _plain(name: str) -> str:
    """A heading must not look like two."""
    return one_line(name).replace("|", "/").replace(":", " ").replace("_", " ")
