"""Whether the script has a DistributedDataParallel, and how a remedy changes its arguments
or what it exchanges.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope.errors import RefusedError
from stepscope.fix.proposal import Proposal, Script, set_arguments
from stepscope.fix.python_source import PythonSource
from stepscope.records.script_facts import Built, ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.declaration import Apply, Patch
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess

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


def all_have(facts: ScriptFacts, option: str) -> bool:
    """Whether every DDP of the script has this option on."""
    return all(bool(built.options.get(option)) for built in facts.of_kind("ddp"))


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


def switch_on(option: str) -> tuple[Apply, Patch]:
    """Return `apply` and `patch` of a remedy that gives every DDP `option=True`."""

    def apply(training: TrainingProcess, value: str) -> None:
        give_ddp(training, {option: True})

    def patch(script: Script, value: str) -> Proposal:
        return write_ddp(script, {option: "True"})

    return apply, patch


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


# DDP's communication hooks: what is exchanged in place of the gradients themselves.

FOLDER = "torch.distributed.algorithms.ddp_comm_hooks"


@dataclass(frozen=True, slots=True, kw_only=True)
class HookSource:
    """A hook as the source names it: what to import, and the two arguments of register_comm_hook.
    `{ddp}` in the state stands for the DDP."""

    module: str
    names: tuple[str, ...]
    state: str
    hook: str

    def call(self, ddp: str) -> str:
        return f"{ddp}.register_comm_hook({self.state.format(ddp=ddp)}, {self.hook})"


def register(
    training: TrainingProcess, words: str, make: Callable[[Any], tuple[Any, Callable[..., Any]]]
) -> None:
    """Give every DDP a hook, just before the first forward: by then the script has registered its
    own, if it has one, and DDP takes only one. `make(ddp)` returns the hook's state and the hook,
    or raises RefusedError.
    """
    tell, refuse = training.telling(), training.refusing()
    waiting: list[Any] = []
    training.after_building("ddp", lambda made: waiting.append(made.object))

    def give(_root: Any) -> None:
        while waiting:
            ddp = waiting.pop()
            if ddp._comm_hooks:
                refuse("the script registers its own communication hook")
                continue
            try:
                ddp.register_comm_hook(*make(ddp))
            except RefusedError as error:
                refuse(str(error))
            except (RuntimeError, TypeError, ValueError) as error:
                refuse(f"torch refuses the hook: {str(error).splitlines()[0]}")
            else:
                tell(f"{type(ddp).__name__}: {words}")

    training.when_root(give)


def write_registration(script: Script, hook: HookSource) -> Proposal:
    """The call after the statement that builds each DDP."""
    proposal = Proposal()
    for built in script.facts.of_kind("ddp"):
        proposal += _write_one(script, built, hook)
    return proposal


def _write_one(script: Script, built: Built, hook: HookSource) -> Proposal:
    found = script.building_call(built)
    statement = _assignment(*found) if found is not None else None
    if found is not None and statement is not None:
        source, _ = found
        added = source.insert_after(statement, hook.call(source.segment(statement.targets[0])))
        return Proposal(edits=(*source.ensure_from_import(hook.module, *hook.names), added))
    where = f" (it is built at {built.frames[0].words})" if built.frames else ""
    imports = f"from {hook.module} import {', '.join(hook.names)}"
    return Proposal(
        by_hand=(f"after DistributedDataParallel is built{where}: {imports}; {hook.call('model')}",)
    )


def _assignment(source: PythonSource, call: ast.Call) -> ast.Assign | None:
    """`name = DistributedDataParallel(...)`, if the statement with this call does no more."""
    statement = next(node for node in source.parents_of(call) if isinstance(node, ast.stmt))
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    is_place = isinstance(statement.targets[0], ast.Name | ast.Attribute)
    return statement if statement.value is call and is_place else None
