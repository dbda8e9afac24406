"""DDP's buckets smaller or larger: bucket_cap_mb."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.remedies.distributed.ddp import (
    caps_of,
    count_buckets,
    give_ddp,
    is_size,
    why_no_ddp,
    write_ddp,
)
from stepscope.records.script_facts import ScriptFacts
from stepscope.text.figures import size as size_words

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess

_OWN_LIST = "the script gives every bucket its own size (bucket_cap_mb_list)"


def fits(facts: ScriptFacts, value: str) -> str | None:
    why_not = why_no_ddp(facts)
    if why_not is not None:
        return why_not
    cap = float(value)
    present = [caps_of(built) for built in facts.of_kind("ddp")]
    if None in present:
        return _OWN_LIST
    size = facts.parameter_bytes
    now = [count_buckets(size, *caps) for caps in present if caps is not None]
    if all(caps == (cap, cap) for caps in present):
        return f"buckets hold {value} MiB already"
    if all(count == count_buckets(size, cap, cap) for count in now):
        return f"{size_words(size)} of gradients fill as many buckets as now"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    give_ddp(training, {"bucket_cap_mb": _number(value)}, _has_own_list)


def patch(script: Script, value: str) -> Proposal:
    return write_ddp(script, {"bucket_cap_mb": str(_number(value))})


def _has_own_list(made: Made) -> str | None:
    return _OWN_LIST if made.value("bucket_cap_mb_list") else None


def _number(value: str) -> float:
    number = float(value)
    return int(number) if number.is_integer() else number


FIX = Fix(
    id="bucket-mb",
    effect=Effect.ROUNDING,  # sums of more than two ranks are made in another order
    family="ddp-buckets",
    values=("5", "10", "50", "100", "1"),
    accepts=is_size,
    fits=fits,
    apply=apply,
    patch=patch,
)
