"""torch.compile of the modules that the script calls, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.model_structure import is_compiled, torchs_forward
from stepscope.fix.proposal import (
    Proposal,
    Script,
    add_before_training,
    import_where_edited,
    submodule,
)
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_VALUES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.compiled:
        return "the script compiles its model already"
    if not facts.roots:
        return "stepscope saw no call of a model"
    if facts.no_compiler:
        return facts.no_compiler
    if value == "reduce-overhead" and facts.device != "cuda":
        return "it captures CUDA graphs, so it needs a CUDA device"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    import torch

    tell = training.telling()

    def compile_in_place(module: Any) -> None:
        if any(is_compiled(part) for part in module.modules()):
            return
        mode = {} if value == "default" else {"mode": value}
        path = torchs_forward(module)
        if path is None:
            module.compile(**mode)
        else:
            inner = module.get_submodule(path)
            inner.forward = torch.compile(inner.forward, **mode)
        tell(f"{type(module).__name__}: {_line('model', path, value)}")

    training.when_root(compile_in_place)


def _line(name: str, path: str | None, value: str) -> str:
    mode = "" if value == "default" else f'mode="{value}"'
    if path is None:
        return f"{name}.compile({mode})"
    forward = f"{submodule(name, path)}.forward"
    return f"{forward} = torch.compile({', '.join(filter(None, (forward, mode)))})"


def patch(script: Script, value: str) -> Proposal:
    proposal = add_before_training(
        script, lambda name, call: (_line(name, call.torchs_forward, value),)
    )
    if all(call.torchs_forward is None for call in script.facts.root_calls):
        return proposal
    return import_where_edited(script, proposal, "torch")


FIX = Fix(
    id="compile",
    effect=Effect.RANDOM,  # it draws the random numbers of dropout in its own way
    may_be=Effect.ROUNDING,
    fits=fits,
    apply=apply,
    patch=patch,
    values=_VALUES,
    accepts=lambda value: value in _VALUES,
    family="compile",
    after=frozenset({"precision"}),
)
