"""The head of a bench's page: where and by which rules it was measured."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stepscope.records.figures import significant
from stepscope.records.words import counted, sentence
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.records.bench_result import BenchMachine, BenchResults

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
