"""DDP's communication hooks: what is exchanged in place of the gradients themselves."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope.fix.proposal import Proposal
from stepscope.fix.refusal import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.fix.proposal import Script
    from stepscope.fix.python_source import PythonSource
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import Built, Frame

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
