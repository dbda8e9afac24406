"""As many threads per operator as a rank has cores, or half as many.

Cores that share their arithmetic units in pairs (SMT) often train faster with half. How work is
split decides the order of sums: results are the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stepscope.fix.cores import (
    cores_per_rank,
    keep_threads,
    patch_threads,
    share_of_cores,
    variables_for,
    why_not_threads,
)
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_ALL, _HALF = "cores", "half"


def _number(value: str, cores: int) -> int:
    if value.isdecimal():
        return int(value)
    return cores if value == _ALL else max(1, cores // 2)


def _number_here(facts: ScriptFacts, value: str) -> int:
    cores = share_of_cores(facts.cores, facts.machine_cores, facts.local_ranks)
    return _number(value, cores)


def fits(facts: ScriptFacts, value: str) -> str | None:
    number = _number_here(facts, value)
    if number == 1 and not value.isdecimal():
        return "a rank has one core, so one-thread does the same"
    return why_not_threads(facts, number)


def environment(value: str, variables: Mapping[str, str]) -> dict[str, str | None]:
    """Only a number is known before the ranks are: the rest is set in the process."""
    return variables_for(int(value), variables) if value.isdecimal() else {}


def apply(training: TrainingProcess, value: str) -> None:
    keep_threads(training, lambda: _number(value, cores_per_rank()))


def patch(script: Script, value: str) -> Proposal:
    return patch_threads(script, _number_here(script.facts, value))


FIX = Fix(
    id="threads",
    effect=Effect.ROUNDING,
    family="threads",
    values=(_ALL, _HALF),
    accepts=lambda value: value in (_ALL, _HALF) or (value.isdecimal() and int(value) > 0),
    fits=fits,
    apply=apply,
    environment=environment,
    patch=patch,
)
