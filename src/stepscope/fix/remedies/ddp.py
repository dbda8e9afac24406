"""Arguments of DistributedDataParallel, and what it exchanges in place of gradients."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope.errors import RefusedError
from stepscope.fix.declaration import Fix
from stepscope.fix.proposal import Proposal, Script, set_arguments
from stepscope.fix.python_source import PythonSource
from stepscope.records.script_facts import Built, ScriptFacts
from stepscope.text.figures import size as size_words

if TYPE_CHECKING:
    from stepscope.fix.declaration import Fits
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


def _all_have(facts: ScriptFacts, option: str) -> bool:
    """Whether every DDP of the script has this option on."""
    return all(bool(built.options.get(option)) for built in facts.of_kind("ddp"))


def _is_size(value: str) -> bool:
    """Whether a user's word is a positive number, of MiB."""
    try:
        return 0 < float(value) < float("inf")
    except ValueError:
        return False


def _caps_of(built: Built) -> tuple[float, float] | None:
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


def _give_ddp(
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


def _switch_on(option: str, why_not: Fits) -> Fix:
    """Return the fix that gives every DDP `option=True`."""
    return Fix(
        fits=_with_ddp(why_not),
        apply=lambda training, _value: _give_ddp(training, {option: True}),
        patch=lambda script, _value: _write_ddp(script, {option: "True"}),
    )


def _with_ddp(why_not: Fits) -> Fits:
    """Ask `why_not` only where ranks exchange gradients through DDP."""
    return lambda facts, value: why_no_ddp(facts) or why_not(facts, value)


def _write_ddp(script: Script, arguments: Mapping[str, str]) -> Proposal:
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
class _HookSource:
    """A hook as the source names it: what to import, and the two arguments of register_comm_hook.
    `{ddp}` in the state stands for the DDP."""

    module: str
    names: tuple[str, ...]
    state: str
    hook: str

    def call(self, ddp: str) -> str:
        return f"{ddp}.register_comm_hook({self.state.format(ddp=ddp)}, {self.hook})"


def _register(
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


def _write_registration(script: Script, hook: _HookSource) -> Proposal:
    """The call after the statement that builds each DDP."""
    proposal = Proposal()
    for built in script.facts.of_kind("ddp"):
        proposal += _write_one(script, built, hook)
    return proposal


def _write_one(script: Script, built: Built, hook: _HookSource) -> Proposal:
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


# Gradients that live in DDP's buckets instead of being copied there: gradient_as_bucket_view.


def _why_not_bucket_view(facts: ScriptFacts, value: str) -> str | None:
    if _all_have(facts, "gradient_as_bucket_view"):
        return "gradients are views of the buckets already"
    return None


BUCKET_VIEW = _switch_on("gradient_as_bucket_view", _why_not_bucket_view)

# DDP that trusts the graph of the first step for all others: static_graph.
#
# torch raises an error as soon as another parameter is used or left out: the trial then fails.


def _why_not_static_graph(facts: ScriptFacts, value: str) -> str | None:
    if _all_have(facts, "static_graph"):
        return "DDP already uses a static graph"
    if facts.graph_changes:
        return "the set of unused parameters changes from step to step"
    if facts.synced_passes != facts.passes_per_step:
        return "some passes run under no_sync(), which DDP does not support with a static graph"
    return None


STATIC_GRAPH = _switch_on("static_graph", _why_not_static_graph)

# DDP's buckets smaller or larger: bucket_cap_mb.

_OWN_LIST = "the script gives every bucket its own size (bucket_cap_mb_list)"


def _why_not_bucket_mb(facts: ScriptFacts, value: str) -> str | None:
    cap = float(value)
    present = [_caps_of(built) for built in facts.of_kind("ddp")]
    if None in present:
        return _OWN_LIST
    size = facts.parameter_bytes
    now = [count_buckets(size, *caps) for caps in present if caps is not None]
    if all(caps == (cap, cap) for caps in present):
        return f"buckets hold {value} MiB already"
    if all(count == count_buckets(size, cap, cap) for count in now):
        return f"{size_words(size)} of gradients fill as many buckets as now"
    return None


def _apply_bucket_mb(training: TrainingProcess, value: str) -> None:
    _give_ddp(training, {"bucket_cap_mb": _number(value)}, _has_own_list)


def _patch_bucket_mb(script: Script, value: str) -> Proposal:
    return _write_ddp(script, {"bucket_cap_mb": str(_number(value))})


def _has_own_list(made: Made) -> str | None:
    return _OWN_LIST if made.value("bucket_cap_mb_list") else None


def _number(value: str) -> float:
    number = float(value)
    return int(number) if number.is_integer() else number


BUCKET_MB = Fix(
    accepts=_is_size,
    fits=_with_ddp(_why_not_bucket_mb),
    apply=_apply_bucket_mb,
    patch=_patch_bucket_mb,
)


# DDP's first bucket smaller or larger: the first all-reduce then begins earlier or later.
#
# DDP closes its first bucket at torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, where the script
# gives no bucket_cap_mb; otherwise that holds for all buckets.

_FIRST_BUCKET = "torch.distributed._DEFAULT_FIRST_BUCKET_BYTES"
_OWN_CAP = "the script sets bucket_cap_mb, which holds for the first bucket too. Use bucket-mb"


def _why_not_first_bucket_mb(facts: ScriptFacts, value: str) -> str | None:
    mib = float(value)
    if any(_has_own_cap(built.options) for built in facts.of_kind("ddp")):
        return _OWN_CAP
    if mib == DEFAULT_FIRST_MIB:
        return f"the first bucket holds {value} MiB already"
    if facts.parameter_bytes <= min(mib, DEFAULT_FIRST_MIB) * MIB:
        return "all gradients fit into the first bucket"
    return None


def _apply_first_bucket_mb(training: TrainingProcess, value: str) -> None:
    tell, refuse = training.telling(), training.refusing()

    def change(made: Made) -> None:
        import torch.distributed as dist

        if _has_own_cap({**made.defaults, **made.arguments}):
            refuse(_OWN_CAP)
            return
        dist._DEFAULT_FIRST_BUCKET_BYTES = int(float(value) * MIB)
        tell(f"{made.name}: its first bucket holds {value} MiB")

    training.before_building("ddp", change)


def _patch_first_bucket_mb(script: Script, value: str) -> Proposal:
    line = f"{_FIRST_BUCKET} = {int(float(value) * MIB)}  # {value} MiB"
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


FIRST_BUCKET_MB = Fix(
    accepts=_is_size,
    fits=_with_ddp(_why_not_first_bucket_mb),
    apply=_apply_first_bucket_mb,
    patch=_patch_first_bucket_mb,
)


# Buffers that stay each rank's own: DDP sends those of rank 0 to all before every forward.
#
# The running statistics of batch norms then differ from rank to rank, and so may what is computed
# in evaluation.

_NEW, _OLD = "forward_sync_buffers", "broadcast_buffers"  # torch obeys the new name, if it has one


def _why_not_no_buffer_broadcast(facts: ScriptFacts, value: str) -> str | None:
    if not facts.buffers:
        return "the model has no buffers"
    if not any(_broadcasts(built.options) for built in facts.of_kind("ddp")):
        return "DDP does not broadcast buffers"
    return None


def _apply_no_buffer_broadcast(training: TrainingProcess, value: str) -> None:
    tell = training.telling()

    def change(made: Made) -> None:
        option = _NEW if made.takes(_NEW) else _OLD
        if _broadcasts({**made.defaults, **made.arguments}):
            made.arguments[option] = False
            tell(f"{made.name}: {option}=False")

    training.before_building("ddp", change)


def _patch_no_buffer_broadcast(script: Script, value: str) -> Proposal:
    has_new = all(_NEW in built.options for built in script.facts.of_kind("ddp"))
    return _write_ddp(script, {_NEW if has_new else _OLD: "False"})


def _broadcasts(options: Mapping[str, Any]) -> bool:
    new = options.get(_NEW)
    return options.get(_OLD) is not False if new is None else bool(new)


NO_BUFFER_BROADCAST = Fix(
    fits=_with_ddp(_why_not_no_buffer_broadcast),
    apply=_apply_no_buffer_broadcast,
    patch=_patch_no_buffer_broadcast,
)


# Gradients exchanged in bf16, half the bytes: DDP's bf16_compress_hook.

_SOURCE = _HookSource(
    module=f"{FOLDER}.default_hooks",
    names=("bf16_compress_hook",),
    state="{ddp}.process_group",
    hook="bf16_compress_hook",
)


def _why_not_compress_gradients(facts: ScriptFacts, value: str) -> str | None:
    if facts.device == "cpu":
        return "torch allows bf16_compress_hook on CUDA devices with NCCL only"
    if facts.dtypes and "float32" not in facts.dtypes:
        return "no gradient is fp32"
    return None


def _apply_compress_gradients(training: TrainingProcess, value: str) -> None:
    def make(ddp: Any) -> tuple[Any, Any]:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        return ddp.process_group, bf16_compress_hook

    _register(training, "gradients are exchanged in bf16", make)


def _patch_compress_gradients(script: Script, value: str) -> Proposal:
    return _write_registration(script, _SOURCE)


COMPRESS_GRADIENTS = Fix(
    fits=_with_ddp(_why_not_compress_gradients),
    apply=_apply_compress_gradients,
    patch=_patch_compress_gradients,
)


# Gradients exchanged as low-rank products: DDP's powerSGD_hook. The value is the rank.
#
# What the product leaves out of a gradient is added to the next one. The first steps exchange whole
# gradients, as torch requires.

# The hook makes calls as others end: on gloo two buckets may make theirs in another order per rank.
_NEEDS_ORDER = "torch's powerSGD_hook needs NCCL. Over gloo, ranks may wait for each other forever"
_WHOLE_STEPS = 10  # with whole gradients, before compression begins


def _why_not_powersgd(facts: ScriptFacts, value: str) -> str | None:
    if facts.device == "cpu" or facts.backend == "gloo":
        return _NEEDS_ORDER
    return None


def _apply_powersgd(training: TrainingProcess, value: str) -> None:
    def make(ddp: Any) -> tuple[Any, Any]:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
            PowerSGDState,
            powerSGD_hook,
        )

        if ddp.device.type == "cpu" or dist.get_backend(ddp.process_group) == "gloo":
            raise RefusedError(_NEEDS_ORDER)
        state = PowerSGDState(
            ddp.process_group,
            matrix_approximation_rank=int(value),
            start_powerSGD_iter=_WHOLE_STEPS,
        )
        return state, powerSGD_hook

    words = (
        f"gradients are exchanged as low-rank products (rank {value}) after {_WHOLE_STEPS} steps"
    )
    _register(training, words, make)


def _patch_powersgd(script: Script, value: str) -> Proposal:
    arguments = (
        "{ddp}.process_group, "
        f"matrix_approximation_rank={int(value)}, start_powerSGD_iter={_WHOLE_STEPS}"
    )
    source = _HookSource(
        module=f"{FOLDER}.powerSGD_hook",
        names=("PowerSGDState", "powerSGD_hook"),
        state=f"PowerSGDState({arguments})",
        hook="powerSGD_hook",
    )
    return _write_registration(script, source)


POWERSGD = Fix(
    accepts=lambda value: value.isdecimal() and int(value) > 0,
    fits=_with_ddp(_why_not_powersgd),
    apply=_apply_powersgd,
    patch=_patch_powersgd,
)
