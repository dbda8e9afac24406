"""torch.compile of the modules that the script calls, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.refusal import RefusedError
from stepscope.fix.root_places import add_before_training

if TYPE_CHECKING:
    from stepscope.fix.proposal import Proposal, Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts

_VALUES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.compiled:
        return "the script compiles its model already"
    if not facts.roots:
        return "no call of a model was seen"
    if facts.no_compiler:
        return facts.no_compiler
    if value == "reduce-overhead" and facts.device != "cuda":
        return "it captures CUDA graphs: it needs a CUDA device"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    if value not in _VALUES:
        raise RefusedError(f"there is no mode {value}: there are {', '.join(_VALUES)}")
    tell = training.telling()

    def compile_in_place(module: Any) -> None:
        if getattr(module, "_compiled_call_impl", None) is None and not hasattr(
            module, "_orig_mod"
        ):
            module.compile(**({} if value == "default" else {"mode": value}))
            tell(f"{type(module).__name__}.{_call(value)}")

    training.when_root(compile_in_place)


def _call(value: str) -> str:
    return "compile()" if value == "default" else f'compile(mode="{value}")'


def patch(script: Script, value: str) -> Proposal:
    return add_before_training(script, lambda name: (f"{name}.{_call(value)}",))


FIX = Fix(
    id="compile",
    effect=Effect.ROUNDING,
    fits=fits,
    apply=apply,
    patch=patch,
    values=_VALUES,
    family="compile",
    after=frozenset({"precision"}),
)
