"""A bench's answer in sentences: how many workloads, how well they use the device, what next."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

from stepscope.records.figures import percent, significant
from stepscope.records.words import counted, sentence
from stepscope.ui.answer import Answer
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.bench_result import BenchMachine, BenchResults, WorkloadResult

_MOST_NAMES = 4
# A rule's name -> its value in words; other rules are printed as they are.
_RULES: dict[str, Callable[[object], str]] = {
    "runs": lambda runs: f"{counted(runs, 'run')} each" if isinstance(runs, int) else str(runs),
    "runs_for_a_claim": lambda runs: f"a claim needs {runs}",
    "dropped": lambda many: f"dropped: {many or 'none'}",
    "interleaved": lambda yes: "runs take turns" if yes else "runs do not take turns",
    "seed": lambda seed: f"seed {seed}",
}


def bench_answer(results: BenchResults) -> Answer:
    return Answer(
        verdict=_verdict(results.workloads), why=_why(results.workloads), next=_next(results)
    )


def _verdict(workloads: Sequence[WorkloadResult]) -> str:
    measured = [row for row in workloads if row.status == "measured"]
    others = len(workloads) - len(measured)
    if not measured:
        return "no workload was measured"
    many = counted(len(measured), "workload")
    words = f"{len(measured)} of {counted(others + len(measured), 'workload')}" if others else many
    return f"{words} measured{_use(measured)}"


def _use(measured: Sequence[WorkloadResult]) -> str:
    """The range of MFU or, where that is not known, of the device's busy share."""
    for name, words in (("mfu", "MFU is"), ("busy", "the device is busy for")):
        known = [(getattr(row, name), row) for row in measured if getattr(row, name) is not None]
        if not known:
            continue
        (low, worst), (high, best) = (pick(known, key=_first) for pick in (min, max))
        if len(known) == 1 or low == high:
            return f": {words} {percent(high)}"
        ends = f"{percent(low)} ({_called(worst)}) to {percent(high)} ({_called(best)})"
        return f": {words} {ends}"
    return ""


def _first(pair: tuple[float, WorkloadResult]) -> float:
    return pair[0]


def _why(workloads: Sequence[WorkloadResult]) -> str:
    measured = [row for row in workloads if row.target_reached is not None]
    missed = [row for row in measured if not row.target_reached]
    if not measured:
        return "whether losses reach their targets is not known"
    if not missed:
        return "every loss that was followed reaches its target"
    return (
        f"{len(measured) - len(missed)} of {counted(len(measured), 'loss', 'losses')} reach their "
        f"targets, not: {_named(missed)}"
    )


def _next(results: BenchResults) -> str:
    failed = [row for row in results.workloads if row.status == "failed"]
    if failed:
        return f"see why {_named(failed)} failed: {one_line(failed[0].why or 'not known')}"
    if results.broken_rules:
        return f"make no claim of these numbers yet: {one_line(results.broken_rules[0])}"
    idle = [row for row in results.workloads if row.busy is not None and row.folder]
    if idle:
        worst = min(idle, key=lambda row: row.busy or 0.0)
        return (
            f"the device works least in {_called(worst)}: stepscope explain "
            f"{shlex.quote(one_line(worst.folder or ''))}"
        )
    return "save these results and compare later ones with them: stepscope bench --save FILE"


def _called(row: WorkloadResult) -> str:
    return one_line(" with ".join([row.name, *(["+".join(row.remedies)] if row.remedies else [])]))


def _named(rows: Sequence[WorkloadResult]) -> str:
    names = [_called(row) for row in rows[:_MOST_NAMES]]
    rest = len(rows) - len(names)
    return ", ".join(names) + (f" and {rest} more" if rest else "")


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
        ("Device", f"{many}{machine.device}" if machine.device else "none, on the processor"),
        ("Processor", f"{machine.processor}, {counted(machine.cores, 'core')}"),
        ("Host", machine.host),
        ("Software", ", ".join(versions)),
        ("Clocks", _clocks(machine)),
        ("Load of others", "" if machine.load is None else f"{significant(machine.load)} cores"),
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
