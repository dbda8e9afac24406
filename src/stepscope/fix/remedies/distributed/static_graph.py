"""DDP that trusts the graph of the first step for all others: static_graph.

torch raises an error as soon as another parameter is used or left out: the trial then fails.
"""

from __future__ import annotations

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.remedies.distributed.ddp import all_have, switch_on, why_no_ddp
from stepscope.records.script_facts import ScriptFacts

_OPTION = "static_graph"


def fits(facts: ScriptFacts, value: str) -> str | None:
    why_not = why_no_ddp(facts)
    if why_not is not None:
        return why_not
    if all_have(facts, _OPTION):
        return "DDP already uses a static graph"
    if facts.graph_changes:
        return "the set of unused parameters changes from step to step"
    if facts.synced_passes != facts.passes_per_step:
        return "some passes run under no_sync(), which DDP does not support with a static graph"
    return None


apply, patch = switch_on(_OPTION)

FIX = Fix(
    id="static-graph",
    effect=Effect.ROUNDING,  # sums of more than two ranks may be made in another order
    family="ddp-passes",  # a static graph and no_sync() exclude each other
    fits=fits,
    apply=apply,
    patch=patch,
)
