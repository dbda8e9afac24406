"""Products of fp32 tensors in tf32: matrix products and convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal

if TYPE_CHECKING:
    from stepscope.fix.proposal import Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts

_LINES = (
    'torch.set_float32_matmul_precision("high")',
    "torch.backends.cudnn.allow_tf32 = True",
)


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cuda":
        return "it needs a CUDA device"
    if facts.dtypes and "float32" not in facts.dtypes:
        return "no parameter is fp32"
    if facts.autocast:
        return f"the script's products run in {facts.autocast} already"
    if facts.matmul_precision != "highest" and facts.conv_tf32:
        return "the script uses tf32 already"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    """Again at the first forward: the script may set what is there by default."""
    import torch

    tell = training.telling()

    def switch(_module: object) -> None:
        if torch.get_float32_matmul_precision() == "highest":
            torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        tell("matrix products and convolutions use tf32")

    training.when_root(switch)


def patch(script: Script, value: str) -> Proposal:
    found = script.source_of(script.facts.forward[::-1])
    if found is None:
        return Proposal(by_hand=(f"before training: {'; '.join(_LINES)}",))
    source, _ = found
    return Proposal(edits=(*source.ensure_import("torch"), source.insert_after_imports(*_LINES)))


FIX = Fix(
    id="tf32", effect=Effect.ROUNDING, family="precision", fits=fits, apply=apply, patch=patch
)
