"""Products of fp32 tensors in tf32: matrix products and convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.errors import RefusedError
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script, set_switches
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_SWITCHES = {
    "torch.set_float32_matmul_precision()": '"high"',
    "torch.backends.cudnn.allow_tf32": "True",
}
_ELSEWHERE = {
    "torch.backends.cuda.matmul.allow_tf32": "True",
    "torch.backends.cuda.matmul.fp32_precision": '"tf32"',
}
_NEWER = "the script sets precision with torch.backends.*.fp32_precision. Choose tf32 there"


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cuda":
        return "it needs a CUDA device"
    if facts.dtypes and "float32" not in facts.dtypes:
        return "no parameter is fp32"
    if facts.autocast:
        return f"the script's matmuls already run in {facts.autocast}"
    if facts.matmul_precision == "mixed":
        return _NEWER
    if facts.matmul_precision != "highest" and facts.conv_tf32:
        return "the script already uses TF32"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    """At the first forward: until then the script may set what it finds."""
    import torch

    tell = training.telling()

    def switch(_module: object) -> None:
        try:
            if torch.get_float32_matmul_precision() == "highest":
                torch.set_float32_matmul_precision("high")
                tell("matmuls use TF32")
            if not torch.backends.cudnn.allow_tf32:
                torch.backends.cudnn.allow_tf32 = True
                tell("convolutions use TF32")
        except RuntimeError:  # torch does not let older and newer switches be used together
            raise RefusedError(_NEWER) from None

    training.when_root(switch)


def patch(script: Script, value: str) -> Proposal:
    wanted = dict(_SWITCHES)
    if script.facts.conv_tf32:  # as torch has it by default
        wanted.pop("torch.backends.cudnn.allow_tf32")
    if script.facts.matmul_precision != "highest":
        wanted.pop("torch.set_float32_matmul_precision()")
    return set_switches(script, wanted, others=_ELSEWHERE)


FIX = Fix(
    id="tf32", effect=Effect.ROUNDING, family="precision", fits=fits, apply=apply, patch=patch
)
