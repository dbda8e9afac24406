"""Batches in pinned memory, copied to the GPU while the host goes on.

pin_memory=True lets the device read a batch by itself; non_blocking=True lets the host not wait for
it. A copy that blocks also waits for everything the GPU has queued before. Only batches that a
DataLoader has pinned are copied so: a script's own buffer may be refilled before the copy is over.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.python_source import PythonSource
from stepscope.fix.remedies.loader.data_loaders import (
    NO_LOADER,
    patch_loaders,
    set_in_loaders,
    training_loaders,
)
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess

_MARK = "_stepscope_pinned"
_ON_THE_HOST = "cpu"


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cuda":
        return "it needs a CUDA device"
    if not training_loaders(facts):
        return NO_LOADER
    return None


def apply(training: TrainingProcess, value: str) -> None:
    import torch

    tell = training.telling()
    set_in_loaders(training, "pin_memory", True, _why_not)
    training.when_imported("torch.utils.data._utils.pin_memory", mark_pinned)

    def copied(name: str) -> None:
        tell(f"batches are copied with {name}(..., non_blocking=True)")

    copy_marked_without_waiting(torch.Tensor, copied, training.surrounds)


def _why_not(_made: Made) -> str | None:
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


def patch(script: Script, value: str) -> Proposal:
    proposal = patch_loaders(
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


FIX = Fix(id="pin-memory", effect=Effect.BIT_IDENTICAL, fits=fits, apply=apply, patch=patch)
