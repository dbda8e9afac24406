"""cuDNN tries its algorithms for each convolution and keeps the fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script, set_switches
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cuda":
        return "it needs a CUDA device"
    if not facts.convolves:
        return "no module is a convolution"
    if facts.cudnn_benchmark:
        return "the script has it on already"
    if facts.deterministic:
        return "the script asks for deterministic algorithms"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    """At the first forward: until then the script may set what it finds."""
    import torch

    tell = training.telling()

    def switch(_module: object) -> None:
        if not torch.backends.cudnn.benchmark:
            torch.backends.cudnn.benchmark = True
            tell("cuDNN times its algorithms and keeps the fastest")

    training.when_root(switch)


def patch(script: Script, value: str) -> Proposal:
    return set_switches(script, {"torch.backends.cudnn.benchmark": "True"})


FIX = Fix(
    id="cudnn-benchmark",
    effect=Effect.ROUNDING,
    fits=fits,
    apply=apply,
    patch=patch,
    after=frozenset({"precision", "channels-last"}),
)
