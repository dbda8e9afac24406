"""DDP's first bucket smaller or larger: the first all-reduce then begins earlier or later.

DDP closes its first bucket at torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, where the script gives
no bucket_cap_mb; otherwise that holds for all buckets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.remedies.distributed.ddp import DEFAULT_FIRST_MIB, MIB, is_size, why_no_ddp
from stepscope.records.script_facts import Built, ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess

_NAME = "torch.distributed._DEFAULT_FIRST_BUCKET_BYTES"
_OWN_CAP = "the script sets bucket_cap_mb, which holds for the first bucket too. Use bucket-mb"


def fits(facts: ScriptFacts, value: str) -> str | None:
    why_not = why_no_ddp(facts)
    if why_not is not None:
        return why_not
    mib = float(value)
    if any(_has_own_cap(built.options) for built in facts.of_kind("ddp")):
        return _OWN_CAP
    if mib == DEFAULT_FIRST_MIB:
        return f"the first bucket holds {value} MiB already"
    if facts.parameter_bytes <= min(mib, DEFAULT_FIRST_MIB) * MIB:
        return "all gradients fit into the first bucket"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    tell, refuse = training.telling(), training.refusing()

    def change(made: Made) -> None:
        import torch.distributed as dist

        if _has_own_cap({**made.defaults, **made.arguments}):
            refuse(_OWN_CAP)
            return
        dist._DEFAULT_FIRST_BUCKET_BYTES = int(float(value) * MIB)
        tell(f"{made.name}: its first bucket holds {value} MiB")

    training.before_building("ddp", change)


def patch(script: Script, value: str) -> Proposal:
    line = f"{_NAME} = {int(float(value) * MIB)}  # {value} MiB"
    proposal = Proposal()
    for built in script.facts.of_kind("ddp"):
        proposal += _set_before(script, built, line)
    return proposal


def _set_before(script: Script, built: Built, line: str) -> Proposal:
    found = script.statement(built.frames[0]) if built.direct and built.frames else None
    if found is not None:
        source, statement = found
        imports = source.ensure_import("torch.distributed")
        return Proposal(edits=(*imports, source.insert_before(statement, line)))
    where = f" ({built.frames[0].words})" if built.frames else ""
    return Proposal(by_hand=(f"before DistributedDataParallel is built{where}: {line}",))


def _has_own_cap(options: dict[str, object]) -> bool:
    return options.get("bucket_cap_mb") is not None or bool(options.get("bucket_cap_mb_list"))


FIX = Fix(
    id="first-bucket-mb",
    effect=Effect.ROUNDING,
    family="ddp-buckets",
    values=("0.25", "4"),
    accepts=is_size,
    fits=fits,
    apply=apply,
    patch=patch,
)
