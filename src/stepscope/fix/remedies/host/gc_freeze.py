"""Garbage collections skip what model and data are made of: gc.freeze() after the first steps."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_STEPS = 5  # by then optimizer states, caches and workers exist
_LINES = ("gc.collect()", "gc.freeze()")


def fits(facts: ScriptFacts, value: str) -> str | None:
    if not facts.collects:
        return "garbage collection is off, or its objects are frozen already"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    tell, refuse = training.telling(), training.refusing()
    steps = 0

    def count(_optimizer: Any) -> None:
        nonlocal steps
        steps += 1
        if steps != _STEPS:
            return
        if not gc.isenabled():
            refuse("the script has turned garbage collection off")
            return
        gc.collect()
        gc.freeze()
        tell(f"froze all objects that existed after {_STEPS} steps")

    training.after_step(count)


def patch(script: Script, value: str) -> Proposal:
    """Before the outermost loop of the function that steps."""
    for _, source, statement in script.statements(script.facts.step):
        loops = source.loops_around(statement)
        if loops:
            imports = source.ensure_import("gc")
            return Proposal(edits=(*imports, source.insert_before(loops[-1], *_LINES)))
    return Proposal(by_hand=("before the training loop: import gc; " + "; ".join(_LINES),))


FIX = Fix(id="gc-freeze", effect=Effect.BIT_IDENTICAL, fits=fits, apply=apply, patch=patch)
