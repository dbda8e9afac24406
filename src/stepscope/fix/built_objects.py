"""Change the DataLoaders, optimizers and DDPs that a script builds, as several remedies do,
and say why one cannot be changed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope.fix.proposal import Proposal, Script, set_arguments
from stepscope.fix.python_source import PythonSource
from stepscope.fix.refusal import RefusedError

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import Built, Frame, ScriptFacts

# DataLoaders that feed the training, as several remedies change them.

NO_LOADER = "no DataLoader feeds the training"
_LOADER_POSITIONS = {"num_workers": 5, "pin_memory": 7}
_IN_TRAINER = {
    "num_workers": "dataloader_num_workers",
    "pin_memory": "dataloader_pin_memory",
    "persistent_workers": "dataloader_persistent_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
}


def training_loaders(facts: ScriptFacts) -> list[Built]:
    return [built for built in facts.of_kind("loader") if built.trains]


def with_workers(facts: ScriptFacts) -> list[Built]:
    return [built for built in training_loaders(facts) if built.options.get("num_workers")]


def set_in_loaders(
    training: TrainingProcess,
    argument: str,
    value: Any,
    why_not: Callable[[Made], str | None] | None = None,
) -> None:
    """Give every DataLoader an argument; `why_not` says why one cannot have it."""
    tell, leave_alone = training.telling(), training.leaving_alone()

    def change(made: Made) -> None:
        if made.value(argument) == value:
            return
        why = why_not(made) if why_not is not None else None
        if why is not None:
            leave_alone(why)
            return
        made.arguments[argument] = value
        tell(f"{made.name}: {argument}={value}")

    training.before_building("loader", change)


def patch_loaders(
    script: Script,
    argument: str,
    value: str,
    where: Callable[[Built], bool] | None = None,
) -> Proposal:
    option = _IN_TRAINER[argument]
    trainer = f"give TrainingArguments {option}={value}: the Trainer builds the DataLoader"
    return set_arguments(
        script,
        "loader",
        {argument: value},
        positions=_LOADER_POSITIONS,
        where=where,
        in_libraries={"transformers": trainer},
    )


# Optimizers of torch whose update has several forms: one tensor at a time, foreach, fused.

# Where `foreach` stands if it is given without its name; only Adagrad allows that.
POSITIONS = {"foreach": 6}


def why_not_switch(made: Made, form: str) -> str | None:
    """Why an optimizer that is about to be built cannot use this form of update."""
    if not made.takes(form):
        return f"{made.name} has no {form} form"
    if made.value("differentiable"):
        return f"{made.name} is differentiable, which needs one tensor at a time"
    if not str(type(made.object).step.__module__).startswith("torch.optim"):
        return f"{made.name} has its own update"
    return None


def why_none_switches(built: list[Built], form: str) -> str | None:
    """The same for a whole script, before anything is tried."""
    if not built:
        return "no torch optimizer was built"
    able = [one for one in built if form in one.options]
    if not able:
        return f"{built[0].type} has no {form} form"
    if all(one.options.get("fused") for one in able):
        return "the optimizer is fused already"
    if all(one.options.get("differentiable") for one in able):
        return "a differentiable optimizer updates one tensor at a time"
    return None


# What remedies of DistributedDataParallel share: whether there is one, and its arguments.

MIB = 1 << 20
DEFAULT_CAP_MIB = 25  # of a bucket, where the script gives none
DEFAULT_FIRST_MIB = 1
# Where DDP's arguments stand if they are given without their names.
_DDP_POSITIONS = {
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
        return set_arguments(script, "ddp", arguments, positions=_DDP_POSITIONS)
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
    for frame in built.frames[:1] if built.direct else ():
        source = script.source(frame.file)
        name = _ddp_name(source, frame, built.type) if source is not None else None
        if source is not None and name is not None:
            target, statement = name
            added = source.insert_after(statement, hook.call(target))
            return Proposal(edits=(*source.ensure_from_import(hook.module, *hook.names), added))
    where = f" (it is built at {built.frames[0].words})" if built.frames else ""
    imports = f"from {hook.module} import {', '.join(hook.names)}"
    return Proposal(
        by_hand=(f"after DistributedDataParallel is built{where}: {imports}; {hook.call('model')}",)
    )


def _ddp_name(source: PythonSource, frame: Frame, called: str) -> tuple[str, ast.Assign] | None:
    """What the script calls the DDP that it builds here, if the statement does no more than that:
    `name = DistributedDataParallel(...)`."""
    statement = source.statement_at(frame.line, frame.ends)
    call = source.call_at(frame.line, called, frame.ends)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    is_place = isinstance(target, ast.Name | ast.Attribute)
    if call is None or statement.value is not call or not is_place:
        return None
    return source.segment(target), statement
