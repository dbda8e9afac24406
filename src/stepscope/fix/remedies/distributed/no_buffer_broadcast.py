"""Buffers that stay each rank's own: DDP sends those of rank 0 to all before every forward.

The running statistics of batch norms then differ from rank to rank, and so may what is computed
in evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.remedies.distributed.ddp import why_no_ddp, write_ddp
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess

_NEW, _OLD = "forward_sync_buffers", "broadcast_buffers"  # torch obeys the new name, if it has one


def fits(facts: ScriptFacts, value: str) -> str | None:
    why_not = why_no_ddp(facts)
    if why_not is not None:
        return why_not
    if not facts.buffers:
        return "the model has no buffers"
    if not any(_broadcasts(built.options) for built in facts.of_kind("ddp")):
        return "DDP does not broadcast buffers"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    tell = training.telling()

    def change(made: Made) -> None:
        option = _NEW if made.takes(_NEW) else _OLD
        if _broadcasts({**made.defaults, **made.arguments}):
            made.arguments[option] = False
            tell(f"{made.name}: {option}=False")

    training.before_building("ddp", change)


def patch(script: Script, value: str) -> Proposal:
    has_new = all(_NEW in built.options for built in script.facts.of_kind("ddp"))
    return write_ddp(script, {_NEW if has_new else _OLD: "False"})


def _broadcasts(options: Mapping[str, Any]) -> bool:
    new = options.get(_NEW)
    return options.get(_OLD) is not False if new is None else bool(new)


FIX = Fix(
    id="no-buffer-broadcast",
    effect=Effect.TRAINING,
    fits=fits,
    apply=apply,
    patch=patch,
)
