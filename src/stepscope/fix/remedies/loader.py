"""Batches that are ready when the training asks for them: arguments of its DataLoaders."""

from __future__ import annotations

import ast
import functools
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from stepscope.fix.cores import share_of_cores
from stepscope.fix.declaration import Fix
from stepscope.fix.proposal import Proposal, Script, set_arguments
from stepscope.fix.python_source import PythonSource
from stepscope.records.script_facts import Built, ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess


_NO_LOADER = "no DataLoader feeds the training"
_POSITIONS = {"num_workers": 5, "pin_memory": 7}
_IN_TRAINER = {
    "num_workers": "dataloader_num_workers",
    "pin_memory": "dataloader_pin_memory",
    "persistent_workers": "dataloader_persistent_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
}


def _training_loaders(facts: ScriptFacts) -> list[Built]:
    return [built for built in facts.of_kind("loader") if built.trains]


def _with_workers(facts: ScriptFacts) -> list[Built] | str:
    """The training's DataLoaders that have workers, or why there is none."""
    loaders = _training_loaders(facts)
    if not loaders:
        return _NO_LOADER
    having = [built for built in loaders if built.options.get("num_workers")]
    return having or "the DataLoader has no workers"


def _set_in_loaders(
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


def _set_for_workers(training: TrainingProcess, argument: str, value: Any) -> None:
    """Give an argument that torch refuses without workers."""

    def why_not(made: Made) -> str | None:
        return None if made.value("num_workers") else f"{made.name} has no workers"

    _set_in_loaders(training, argument, value, why_not)


def _patch_loaders(
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
        positions=_POSITIONS,
        where=where,
        in_libraries={"transformers": trainer},
    )


# Processes that prepare batches while the training computes: num_workers of the DataLoader.
#
# None (0) is a value, too: small batches take longer to hand over than to make.
#
# Workers have random numbers of their own: a dataset that draws some gets others than before. One
# that draws none gives the same batches in the same order.

_PER_CORE = 2  # workers that wait for files or a network leave cores free
# The DataLoader's arguments that mean nothing, or raise, without workers.
_OF_WORKERS = (
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "timeout",
    "worker_init_fn",
)
_ALL_OF_IT = "the dataset is an IterableDataset, so every worker would yield all of it"


def _why_not_loader_workers(facts: ScriptFacts, value: str) -> str | None:
    loaders = _training_loaders(facts)
    if not loaders:
        return _NO_LOADER
    cores = share_of_cores(facts.cores, facts.machine_cores, facts.local_ranks)
    if int(value) > _PER_CORE * cores:
        return f"a rank has {cores} cores here"
    able = [built for built in loaders if int(value) < 2 or not built.iterable]
    if not able:
        return _ALL_OF_IT
    if all((built.options.get("num_workers") or 0) == int(value) for built in able):
        return f"the DataLoader has {value if int(value) else 'no'} workers already"
    return None


def _apply_loader_workers(training: TrainingProcess, value: str) -> None:
    count = int(value)

    def why_not(made: Made) -> str | None:
        if not count:
            _without_workers(made)
            return None
        return _why_no_workers(made, count)

    _set_in_loaders(training, "num_workers", count, why_not)


def _without_workers(made: Made) -> None:
    """torch refuses arguments of workers where there are none."""
    for argument in _OF_WORKERS:
        made.arguments.pop(argument, None)


def _why_no_workers(made: Made, count: int) -> str | None:
    from torch.utils.data import IterableDataset

    dataset = made.value("dataset")
    if count > 1 and isinstance(dataset, IterableDataset):
        return _ALL_OF_IT
    if any(tensor.is_cuda for tensor in getattr(dataset, "tensors", ())):
        return "the dataset is already on the GPU, where workers cannot reach it"
    if multiprocessing.current_process().daemon:
        return "this process is a daemon, so it cannot start workers"
    return None


def _patch_loader_workers(script: Script, value: str) -> Proposal:
    many = int(value) > 1
    proposal = _patch_loaders(
        script, "num_workers", value, lambda built: not (many and built.iterable)
    )
    if int(value):
        return proposal
    for argument, none in (("persistent_workers", "False"), ("prefetch_factor", "None")):
        if any(argument in built.given for built in _training_loaders(script.facts)):
            given = partial(lambda argument, built: argument in built.given, argument)
            proposal += _patch_loaders(script, argument, none, given)
    return proposal


LOADER_WORKERS = Fix(
    accepts=str.isdecimal,
    fits=_why_not_loader_workers,
    apply=_apply_loader_workers,
    patch=_patch_loader_workers,
)


# Workers of a DataLoader that outlive an epoch: persistent_workers=True.
#
# They keep their copies of the dataset and go on with their random numbers. So what the script
# changes in the dataset between epochs does not reach them, and from the second epoch on a dataset
# that draws random numbers gets others.


def _why_not_persistent_workers(facts: ScriptFacts, value: str) -> str | None:
    loaders = _with_workers(facts)
    if isinstance(loaders, str):
        return loaders
    if all(built.options.get("persistent_workers") for built in loaders):
        return "the workers already persist"
    if all(built.begun < 2 for built in loaders):
        return "no second epoch began in these steps, so its gain cannot be measured"
    return None


def _apply_persistent_workers(training: TrainingProcess, value: str) -> None:
    _set_for_workers(training, "persistent_workers", True)


def _patch_persistent_workers(script: Script, value: str) -> Proposal:
    return _patch_loaders(script, "persistent_workers", "True")


PERSISTENT_WORKERS = Fix(
    fits=_why_not_persistent_workers,
    apply=_apply_persistent_workers,
    patch=_patch_persistent_workers,
)


# Each worker of a DataLoader loads more batches ahead: prefetch_factor (torch's default is 2).


def _why_not_prefetch_factor(facts: ScriptFacts, value: str) -> str | None:
    loaders = _with_workers(facts)
    if isinstance(loaders, str):
        return loaders
    if all(built.options.get("prefetch_factor") == int(value) for built in loaders):
        return f"each worker loads {value} batches ahead already"
    return None


def _apply_prefetch_factor(training: TrainingProcess, value: str) -> None:
    _set_for_workers(training, "prefetch_factor", int(value))


def _patch_prefetch_factor(script: Script, value: str) -> Proposal:
    return _patch_loaders(script, "prefetch_factor", value)


PREFETCH_FACTOR = Fix(
    accepts=lambda value: value.isdecimal() and int(value) > 0,
    fits=_why_not_prefetch_factor,
    apply=_apply_prefetch_factor,
    patch=_patch_prefetch_factor,
)


# Batches in pinned memory, copied to the GPU while the host goes on.
#
# pin_memory=True lets the device read a batch by itself; non_blocking=True lets the host not wait
# for it. A copy that blocks also waits for everything the GPU has queued before. Only batches that
# a DataLoader has pinned are copied so: a script's own buffer may be refilled before the copy ends.

_MARK = "_stepscope_pinned"
_ON_THE_HOST = "cpu"


def _why_not_pin_memory(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cuda":
        return "it needs a CUDA device"
    if not _training_loaders(facts):
        return _NO_LOADER
    return None


def _apply_pin_memory(training: TrainingProcess, value: str) -> None:
    import torch

    tell = training.telling()
    _set_in_loaders(training, "pin_memory", True, _why_no_device)
    training.when_imported("torch.utils.data._utils.pin_memory", mark_pinned)

    def copied(name: str) -> None:
        tell(f"batches are copied with {name}(..., non_blocking=True)")

    copy_marked_without_waiting(torch.Tensor, copied, training.surrounds)


def _why_no_device(_made: Made) -> str | None:
    """Asked only now: looking for devices before the script does could spoil its forks."""
    import torch

    return None if torch.cuda.is_available() else "there is no CUDA device"


def mark_pinned(module: Any) -> None:
    """Mark every tensor that a DataLoader pins; torch's function calls itself for what batches are
    made of."""
    import torch

    original = module.pin_memory

    @functools.wraps(original)
    def pin_memory(data: Any, *args: Any, **kwargs: Any) -> Any:
        pinned = original(data, *args, **kwargs)
        if type(pinned) is torch.Tensor:
            setattr(pinned, _MARK, True)
        return pinned

    module.pin_memory = pin_memory


def copy_marked_without_waiting(owner: Any, copied: Any, surrounds: Any) -> None:
    """`copied` is told the name of the method whose call was changed."""
    for name, goes_to_gpu in (("to", _goes_to_gpu), ("cuda", lambda *_: True)):
        setattr(owner, name, surrounds(_copying(owner, name, goes_to_gpu, copied)))


def _copying(owner: Any, name: str, goes_to_gpu: Any, copied: Any) -> Any:
    original = getattr(owner, name)

    @functools.wraps(original)
    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Positional booleans are torch's own non_blocking and copy: leave such calls as they are.
        if (
            getattr(self, _MARK, False)
            and "non_blocking" not in kwargs
            and not any(isinstance(argument, bool) for argument in args)
            and goes_to_gpu(args, kwargs)
        ):
            kwargs["non_blocking"] = True
            copied(name)
        return original(self, *args, **kwargs)

    return copy


def _goes_to_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    import torch

    target = kwargs.get("device", kwargs.get("other", args[0] if args else None))
    if isinstance(target, torch.Tensor):
        target = target.device
    if isinstance(target, int) and not isinstance(target, bool):
        return True
    return isinstance(target, str | torch.device) and torch.device(target).type == "cuda"


def _patch_pin_memory(script: Script, value: str) -> Proposal:
    proposal = _patch_loaders(
        script, "pin_memory", "True", lambda built: not built.options.get("pin_memory")
    )
    for _, source, statement in script.statements(script.facts.forward):
        for loop in source.loops_around(statement):
            edits = [
                source.set_keyword(call, "non_blocking", "True")
                for call in _copies_of_batch(loop, source)
            ]
            made = tuple(edit for edit in edits if edit is not None)
            if made:
                return proposal + Proposal(edits=made)
    words = "copy each batch with .to(device, non_blocking=True)"
    return proposal + Proposal(by_hand=(words,))


def _copies_of_batch(loop: ast.For | ast.While, source: PythonSource) -> Iterator[ast.Call]:
    """Calls of .to and .cuda on what the loop was given."""
    names = set(_bound_names(loop))
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and source.called(node) in ("to", "cuda"):
            receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
            if _root_name(receiver) in names and not _stays_or_says(node):
                yield node


def _bound_names(loop: ast.For | ast.While) -> Iterator[str]:
    """Names of the batch: the loop's own, those unpacked from them, and those of comprehensions
    over them."""
    names = set(_names(loop.target)) if isinstance(loop, ast.For) else set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and _is_batch(node.value, names):
            names |= {name for target in node.targets for name in _names(target)}
        elif isinstance(node, ast.comprehension) and _is_batch(node.iter, names):
            names |= set(_names(node.target))
    yield from names


def _is_batch(value: ast.expr, names: set[str]) -> bool:
    """The batch, a part of it, next(iterator) or batch.items()."""
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Name) and value.func.id == "next":
            return True
        is_view = isinstance(value.func, ast.Attribute) and value.func.attr in ("items", "values")
        return is_view and _root_name(value.func) in names
    if isinstance(value, ast.Name | ast.Subscript | ast.Attribute):
        return _root_name(value) in names
    return False


def _names(target: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _root_name(value: ast.expr | None) -> str | None:
    """`batch` of batch["x"].mask."""
    while isinstance(value, ast.Attribute | ast.Subscript):
        value = value.value
    return value.id if isinstance(value, ast.Name) else None


def _stays_or_says(call: ast.Call) -> bool:
    """A copy to the host must be waited for; one that says non_blocking is left as it is."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    says = any(keyword.arg in (None, "non_blocking") for keyword in call.keywords)
    constants = [argument.value for argument in given if isinstance(argument, ast.Constant)]
    return says or any(isinstance(value, bool) or value == _ON_THE_HOST for value in constants)


PIN_MEMORY = Fix(fits=_why_not_pin_memory, apply=_apply_pin_memory, patch=_patch_pin_memory)
