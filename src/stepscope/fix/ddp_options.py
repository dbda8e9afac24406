"""What remedies of DistributedDataParallel share: whether there is one, and its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.fix.constructors import set_arguments
from stepscope.fix.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stepscope.fix.building import Made
    from stepscope.fix.proposal import Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import Built, ScriptFacts

MIB = 1 << 20
DEFAULT_CAP_MIB = 25  # of a bucket, where the script gives none
DEFAULT_FIRST_MIB = 1
# Where DDP's arguments stand if they are given without their names.
_POSITIONS = {
    "device_ids": 1,
    "output_device": 2,
    "dim": 3,
    "broadcast_buffers": 4,
    "init_sync": 5,
    "process_group": 6,
    "bucket_cap_mb": 7,
    "find_unused_parameters": 8,
    "check_reduction": 9,
    "gradient_as_bucket_view": 10,
    "static_graph": 11,
}


def why_no_ddp(facts: ScriptFacts) -> str | None:
    """Why nothing can be changed in how DDP exchanges gradients, or None."""
    if not facts.of_kind("ddp"):
        if any(name.startswith(("FSDP", "FullySharded")) for name in facts.modules):
            return "the model is sharded (FSDP), not wrapped in DistributedDataParallel"
        return "no model is wrapped in DistributedDataParallel"
    if facts.world_size < 2:
        return "a single rank exchanges no gradients"
    return None


def all_have(facts: ScriptFacts, option: str, value: Any = True) -> bool:
    """Whether every DDP of the script has this option at this value."""
    return all(built.options.get(option) == value for built in facts.of_kind("ddp"))


def is_size(value: str) -> bool:
    """Whether a user's word is a positive number, of MiB."""
    try:
        return 0 < float(value) < float("inf")
    except ValueError:
        return False


def caps_of(built: Built) -> tuple[float, float] | None:
    """The sizes in MiB at which DDP closes its first bucket and the others; None where the script
    gives each bucket its own."""
    if built.options.get("bucket_cap_mb_list"):
        return None
    cap = built.options.get("bucket_cap_mb")
    if cap is None:
        return DEFAULT_FIRST_MIB, DEFAULT_CAP_MIB
    return float(cap), float(cap)


def count_buckets(size_bytes: int, first_mib: float, cap_mib: float) -> int:
    """About how many buckets the gradients fill; where parameters end is not looked at."""
    rest = size_bytes - first_mib * MIB
    return 1 if rest <= 0 else 1 + -int(-rest // (cap_mib * MIB))


def give_ddp(
    training: TrainingProcess,
    arguments: Mapping[str, Any],
    unless: Callable[[Made], str | None] = lambda _made: None,
) -> None:
    """Build every DDP with these arguments; `unless` says why one is left as it is."""
    tell, refuse = training.telling(), training.refusing()

    def change(made: Made) -> None:
        new = {
            name: value
            for name, value in arguments.items()
            if made.takes(name) and made.value(name) != value
        }
        why_not = unless(made) if new else None
        if why_not is not None:
            refuse(why_not)
        elif new:
            made.arguments |= new
            words = ", ".join(f"{name}={value}" for name, value in new.items())
            tell(f"{made.name}: {words}")

    training.before_building("ddp", change)


def write_ddp(script: Script, arguments: Mapping[str, str]) -> Proposal:
    """The same arguments in the source, as name -> text."""
    if all(built.direct for built in script.facts.of_kind("ddp")):
        return set_arguments(script, "ddp", arguments, positions=_POSITIONS)
    words = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return Proposal(
        by_hand=(
            f"let your trainer build DistributedDataParallel with {words}. Accelerate takes "
            f"DistributedDataParallelKwargs({words}), Lightning DDPStrategy({words}), and the "
            "Trainer of transformers its ddp_* arguments",
        )
    )
