"""How one change is made: injected into the training process, or written into the source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.fix.proposal import Proposal, Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts

    Apply = Callable[[TrainingProcess, str], None]
    Fits = Callable[[ScriptFacts, str], str | None]
    Patch = Callable[[Script, str], Proposal]
    Environment = Callable[[str, Mapping[str, str]], dict[str, str | None]]
    ValuesOf = Callable[[ScriptFacts], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """The part of a change that works inside the training process: changes/ names it.

    `fits(facts, value)` says why it cannot help here, or None. `apply(training, value)` runs in the
    training process, once torch is imported and before the script has built anything.
    `environment(value, variables)` gives what must be set before Python starts, where `variables`
    are the user's own: a variable of None is unset. Asked again with the result it gives the same.
    `patch(script, value)` is the edit a person would make instead, and trains exactly the same.
    `values_of(facts)` are the values to try where they follow from the script, and `accepts` says
    which values a user may give; None: any.
    """

    fits: Fits
    patch: Patch
    apply: Apply | None = None
    environment: Environment | None = None
    values_of: ValuesOf | None = None
    accepts: Callable[[str], bool] | None = None
