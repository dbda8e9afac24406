"""Backward through time by stepscope.fix.scan."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Fix
from stepscope.fix.proposal import Proposal, Script, add_before_training, import_where_edited
from stepscope.records.scan_costs import LARGEST_LSTM, LARGEST_SIZE
from stepscope.records.script_facts import ScriptFacts
from stepscope.text.words import SITE

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_MODULE = "stepscope.fix.scan"
_PAGE = f"{SITE}/reference/libraries/scan/"
_KINDS = ("RNN", "GRU", "LSTM")
_NAMES = (*_KINDS, *(f"Parametrized{kind}" for kind in _KINDS))  # as torch names them


def fits(facts: ScriptFacts, value: str) -> str | None:
    if not any(map(facts.modules.get, _NAMES)):
        return f"no module is an nn.RNN, nn.GRU or nn.LSTM ({_PAGE})"
    root = next((name for name in _NAMES if name in facts.roots), None)
    if root is not None:
        kind = root.removeprefix("Parametrized")
        return (
            f"the script calls an nn.{kind} itself. Build a stepscope.fix.scan.Scan{kind} in "
            "its place"
        )
    if facts.device != "cpu" and facts.recurrent and not any(map(_may_pay, facts.recurrent)):
        return (
            f"cuDNN is faster than a scan for an nn.LSTM of more than {LARGEST_LSTM} and an "
            f"nn.RNN of more than {LARGEST_SIZE} ({_PAGE})"
        )
    if facts.compiled:
        return "the model is compiled. Call scan_backward on it before torch.compile"
    return None


def _may_pay(module: tuple[str, int]) -> bool:
    """On a GPU, for some batch and number of steps."""
    kind, size = module[0].removeprefix("Parametrized"), module[1]
    return size <= {"LSTM": LARGEST_LSTM, "RNN": LARGEST_SIZE}.get(kind, size)


def apply(training: TrainingProcess, value: str) -> None:
    """Parameters stay the same objects, so an optimizer and DDP that know them go on."""
    tell = training.telling()

    def convert(module: Any) -> None:
        from torch import nn

        if not any(isinstance(child, nn.RNNBase) for child in module.modules()):
            return
        from stepscope.fix.scan.modules import is_replaceable, scan_backward

        kinds = [type(child).__name__ for child in module.modules() if is_replaceable(child)]
        if kinds and not is_replaceable(module):
            scan_backward(module)
            counts = Counter(kind.removeprefix("Parametrized") for kind in kinds)
            words = ", ".join(f"{count} nn.{kind}" for kind, count in counts.items())
            tell(f"{type(module).__name__}: backward through {words} by a scan")

    training.when_root(convert)


def patch(script: Script, value: str) -> Proposal:
    proposal = add_before_training(
        script, lambda name, _call: (f"{_MODULE}.scan_backward({name})",)
    )
    return import_where_edited(script, proposal, _MODULE)


FIX = Fix(fits=fits, apply=apply, patch=patch)
