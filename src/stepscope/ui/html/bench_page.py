"""Write the page of a bench: where it was measured, all workloads side by side, their memory
and time as stacks, and every number in a table.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmeasuredWorkload:
    name: str
    about: str
    status: str
    why: str


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
    return {
        "answer": bench_answer(results),
        "facts": _facts(results, against),
        "rules": rules_words(results),
        "broken": [one_line(rule) for rule in results.broken_rules],
        "command": shlex.join(map(one_line, results.command)),
        "unmeasured": _unmeasured(results),
        "metrics": shown_metrics(list(measured.values())),
        "rows": rows,
        "compared": compared,
        "before": "" if not before else "before" if against else "without changes",
        "against": against_answer(comparison) if comparison else None,
        "against_tone": _against_tone(comparison),
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
        "data": Markup(
            json_block({"tables": [numbers_table(measured, _changes(measured, comparison))]})
        ),
    }


def _against_tone(comparison: BenchComparison | None) -> str:
    verdicts = {row.verdict for row in comparison.workloads} if comparison else set()
    return "bad" if "slower" in verdicts else "good" if "faster" in verdicts else "still"


def _changes(
    measured: Mapping[str, WorkloadResult], comparison: BenchComparison | None
) -> dict[str, float | None]:
    if comparison is None:
        return {}
    return {key: comparison.workloads[int(key)].counted_change for key in measured}


def _facts(results: BenchResults, against: BenchResults | None) -> list[tuple[str, str]]:
    facts = machine_facts(results.machine) if results.machine else []
    facts.append(("Measured", when_words(results.started_unix)))
    if against is not None:
        facts.append(("Compared with results of", when_words(against.started_unix)))
    facts.append(("stepscope", one_line(results.stepscope)))
    return facts


def _unmeasured(results: BenchResults) -> list[UnmeasuredWorkload]:
    abouts = distinctions(results.workloads)
    return [
        UnmeasuredWorkload(
            name=short_name(result.name),
            about=about or one_line(result.size),
            status=result.status,
            why=one_line(result.why or "the reason is not known"),
        )
        for result, about in zip(results.workloads, abouts, strict=True)
        if result.status != "measured"
    ]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPiece:
    look: str  # classes of its colour
    share: float
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadStack:
    """One workload's bar: `share` is its length where bars are drawn to one scale."""

    key: str
    name: str
    about: str
    total: str
    share: float
    pieces: tuple[StackPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackChart:
    id: str
    title: str
    caption: str
    to_scale: str  # the name of the view in which lengths are amounts
    key: tuple[tuple[str, str, str], ...]  # look, label, hint
    stacks: tuple[WorkloadStack, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
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
    held = {key: result for key, result in measured.items() if any(result.memory.values())}
    looks = {name: (f"m-{name}", LABELS[name], "") for name in CATEGORIES}
    return _chart(
        held,
        lambda result: result.memory,
        looks,
        size,
        name="memory",
        title="What is in memory at the peak",
        to_scale="bytes",
        caption="Bytes at the moment of the peak, by their use.",
    )


def budget_chart(measured: Mapping[str, WorkloadResult]) -> StackChart | None:
    """None where no workload's step was divided."""
    divided = {key: result for key, result in measured.items() if any(result.budget_ms.values())}
    looks = {}
    for name in PARTS:
        part = slice_of(name)
        pattern = " is-idle" if part.idle else " is-stall" if part.stall else ""
        looks[name] = (f"bg-{part.color}{pattern}", part.label, part.hint)
    return _chart(
        divided,
        lambda result: result.budget_ms,
        looks,
        milliseconds,
        name="budget",
        title="Where the step goes",
        to_scale="milliseconds",
        caption="The parts add up to the step. Striped: the device is idle.",
    )


_Look = tuple[str, str, str]


def _chart(
    measured: Mapping[str, WorkloadResult],
    amounts: Callable[[WorkloadResult], Mapping[str, float]],
    looks: Mapping[str, _Look],
    words: Callable[[float], str],
    *,
    name: str,
    title: str,
    to_scale: str,
    caption: str,
) -> StackChart | None:
    if not measured:
        return None
    results = list(measured.values())
    largest = max(_whole(amounts(result)) for result in results)
    used = {name for result in results for name, amount in amounts(result).items() if amount > 0}
    order = [*(name for name in looks if name in used), *sorted(used - looks.keys())]
    known = {name: looks.get(name) or _unknown(name) for name in order}
    abouts = distinctions(results)
    return StackChart(
        id=name,
        title=title,
        caption=caption,
        to_scale=to_scale,
        key=tuple(known.values()),
        stacks=tuple(
            WorkloadStack(
                key=key,
                name=short_name(result.name),
                about=about,
                total=words(_whole(amounts(result))),
                share=_whole(amounts(result)) / largest,
                pieces=tuple(_pieces(amounts(result), known, words)),
            )
            for (key, result), about in zip(measured.items(), abouts, strict=True)
        ),
    )


def _unknown(name: str) -> _Look:
    """A part that a later version of stepscope wrote down."""
    return "bg-other", one_line(name), ""


def _whole(amounts: Mapping[str, float]) -> float:
    return sum(amount for amount in amounts.values() if amount > 0)


def _pieces(
    amounts: Mapping[str, float], looks: Mapping[str, _Look], words: Callable[[float], str]
) -> Iterable[StackPiece]:
    whole = _whole(amounts)
    for name, (look, label, hint) in looks.items():
        amount = amounts.get(name, 0.0)
        if amount < _LEAST_SHARE * whole:
            continue
        share = amount / whole
        lines = [f"{label}: {words(amount)}, {percent(share)}", *([hint] if hint else [])]
        yield StackPiece(look=look, share=share, tip="\n".join(lines))


def loss_rows(measured: Mapping[str, WorkloadResult]) -> list[LossRow]:
    """Workloads whose first and last loss are known. Each has a scale of its own."""
    known = {
        key: (result, result.loss_first, result.loss_last)
        for key, result in measured.items()
        if result.loss_first is not None and result.loss_last is not None
    }
    abouts = distinctions([result for result, _, _ in known.values()])
    return [
        _loss_row(key, result, first, last, about)
        for (key, (result, first, last)), about in zip(known.items(), abouts, strict=True)
    ]


def _loss_row(key: str, result: WorkloadResult, first: float, last: float, about: str) -> LossRow:
    target = result.target_loss
    at = _places([value for value in (first, last, target) if value is not None])
    words = f"{significant(first)} → {significant(last)}"
    return LossRow(
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

_COLUMNS = (
    "Workload:text",
    "Size:text",
    "Ranks:count",
    "Batch:count",
    "Changes:text",
    "Samples/s:number",
    "from:number",
    "to:number",
    "Step:ns",
    "Busy:share",
    "MFU:share",
    "CPU:share",
    "Peak memory:bytes",
    "predicted:bytes",
    "FLOPs of a step:flops",
    "Bytes of a step:bytes",
    "First loss:number",
    "Last loss:number",
    "Target:number",
    "Steps to it:count",
    "Time to it:ns",
    "Runs:count",
)
_LAST = "All runs took:ns"


def numbers_table(
    measured: Mapping[str, WorkloadResult], changes: Mapping[str, float | None]
) -> dict[str, Any]:
    """`changes` of the step are by key; empty where nothing is compared.

    Each kind of compute share and counter that any workload has is a column too.
    """
    results = measured.values()
    shares = list(dict.fromkeys(name for row in results for name in row.compute_share))
    counters = list(dict.fromkeys(name for row in results for name in row.counters))
    more = ["Change of the step:change"] if changes else []
    more += ["Times as fast:times"] if any(row.speedup for row in results) else []
    more += [f"{_plain(name)} peak:share" for name in shares]
    more += [f"{_plain(name)}:share" for name in counters]
    columns = " | ".join([*_COLUMNS, *more, _LAST])
    rows = [
        (
            *_row(result),
            *([changes.get(key)] if changes else []),
            *([result.speedup] if any(row.speedup for row in results) else []),
            *(result.compute_share.get(name) for name in shares),
            *(result.counters.get(name) for name in counters),
            None if result.seconds is None else result.seconds * 1e9,
        )
        for key, result in measured.items()
    ]
    return make_table("Workloads", columns, rows, sort=-1)


def _plain(name: str) -> str:
    """A heading must not look like two."""
    return one_line(name).replace("|", "/").replace(":", " ").replace("_", " ")


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None


def _row(result: WorkloadResult) -> tuple[Any, ...]:
    seconds = result.time_to_target_s
    return (
        one_line(result.name),
        one_line(result.size),
        result.ranks,
        _number(result.settings.get("batch")),
        one_line(" + ".join(result.remedies)),
        result.samples_per_s,
        result.low,
        result.high,
        None if result.step_ms is None else result.step_ms * 1e6,
        result.busy,
        result.mfu,
        result.cpu,
        result.peak_bytes,
        result.predicted_peak_bytes,
        result.flops,
        result.bytes_moved,
        result.loss_first,
        result.loss_last,
        result.target_loss,
        result.steps_to_target,
        None if seconds is None else seconds * 1e9,
        len(result.runs_ms) or None,
    )
