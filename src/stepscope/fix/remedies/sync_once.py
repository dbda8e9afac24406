"""Gradients exchanged once a step where a script adds up those of several backward passes.

DDP exchanges them in every pass unless all but the last are under its no_sync(). The value is the
number of passes; without one it is learnt from the first step, which is left as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.accumulation_source import find_loop
from stepscope.fix.ddp_options import why_no_ddp
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.gradient_exchange import GradientExchange
from stepscope.fix.proposal import Proposal

if TYPE_CHECKING:
    from stepscope.fix.proposal import Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts


def fits(facts: ScriptFacts, value: str) -> str | None:
    why_not = why_no_ddp(facts)
    if why_not is not None:
        return why_not + _words_for_others(facts)
    passes = facts.passes_per_step
    if passes is None:
        return "the number of backward passes per step varies"
    if passes == 1:
        return "a step has one backward pass"
    if facts.synced_passes != passes:
        return "some backward passes already run under no_sync()"
    if any(built.options.get("static_graph") for built in facts.of_kind("ddp")):
        return "DDP does not support no_sync() with a static graph"
    if value and value != str(passes):
        return f"a step has {passes} backward passes, not {value}"
    return None


def values_of(facts: ScriptFacts) -> tuple[str, ...]:
    passes = facts.passes_per_step
    return (str(passes),) if passes is not None and passes > 1 else ("",)


def apply(training: TrainingProcess, value: str) -> None:
    GradientExchange(training, int(value) if value else None)


def patch(script: Script, value: str) -> Proposal:
    loop = find_loop(script)
    if loop is None:
        return Proposal(by_hand=(_by_hand(script.facts),))
    header = f"with contextlib.nullcontext() if {loop.is_last} else {loop.ddp}.no_sync():"
    source = loop.source
    wrapped = source.wrap(loop.first, loop.last, header)
    return Proposal(edits=(*source.ensure_import("contextlib"), *wrapped))


def _by_hand(facts: ScriptFacts) -> str:
    where = f" ({facts.backward[0].words})" if facts.backward else ""
    return (
        f"put forward and backward{where} under `with model.no_sync():`, except in the last "
        "pass before optimizer.step(). Here model is the DistributedDataParallel"
    )


def _words_for_others(facts: ScriptFacts) -> str:
    """What does the same without DDP."""
    if (facts.passes_per_step or 1) > 1 and facts.world_size > 1 and not facts.of_kind("ddp"):
        return (
            ". For FSDP write model.set_requires_gradient_sync(is_last_pass), for Accelerate "
            "`with accelerator.accumulate(model):`"
        )
    return ""


FIX = Fix(
    id="sync-once",
    effect=Effect.ROUNDING,
    family="ddp-passes",  # a static graph and no_sync() exclude each other
    values_of=values_of,
    accepts=lambda value: value.isdecimal() and int(value) > 1,
    fits=fits,
    apply=apply,
    patch=patch,
)
