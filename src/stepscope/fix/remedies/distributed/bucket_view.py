"""Gradients that live in DDP's buckets instead of being copied there: gradient_as_bucket_view."""

from __future__ import annotations

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.remedies.distributed.ddp import all_have, switch_on, why_no_ddp
from stepscope.records.script_facts import ScriptFacts

_OPTION = "gradient_as_bucket_view"


def fits(facts: ScriptFacts, value: str) -> str | None:
    why_not = why_no_ddp(facts)
    if why_not is None and all_have(facts, _OPTION):
        return "gradients are views of the buckets already"
    return why_not


apply, patch = switch_on(_OPTION)

FIX = Fix(
    id="bucket-view",
    effect=Effect.ROUNDING,  # DDP divides by the number of ranks instead of multiplying by 1/ranks
    fits=fits,
    apply=apply,
    patch=patch,
)
