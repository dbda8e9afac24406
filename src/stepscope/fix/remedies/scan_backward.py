"""Backward through time of plain RNNs by stepscope.fix.scan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.root_places import add_before_training, import_where_edited

if TYPE_CHECKING:
    from stepscope.fix.proposal import Proposal, Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts

_MODULE = "stepscope.fix.scan"
_PLAIN = ("RNN", "ParametrizedRNN")  # torch names it so when its weights are parametrized


def fits(facts: ScriptFacts, value: str) -> str | None:
    if not any(map(facts.modules.get, _PLAIN)):
        return "no module is an nn.RNN; there is no scan for LSTM and GRU (docs/scan.md)"
    if any(name in facts.roots for name in _PLAIN):
        return "the script calls an nn.RNN itself: build a stepscope.fix.scan.ScanRNN in its place"
    if facts.compiled:
        return "the model is compiled: call scan_backward on it before torch.compile"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    """Parameters stay the same objects, so an optimizer and DDP that know them go on."""
    tell = training.telling()

    def convert(module: Any) -> None:
        from torch import nn

        recurrent = [child for child in module.modules() if isinstance(child, nn.RNN)]
        if not recurrent:
            return
        from stepscope.fix.scan.scan_rnn import is_plain_rnn, scan_backward

        plain = sum(map(is_plain_rnn, recurrent))
        if plain and not is_plain_rnn(module):
            scan_backward(module)
            tell(f"{type(module).__name__}: backward through {plain} nn.RNN by a scan")

    training.when_root(convert)


def patch(script: Script, value: str) -> Proposal:
    proposal = add_before_training(
        script, lambda name, _call: (f"{_MODULE}.scan_backward({name})",)
    )
    return import_where_edited(script, proposal, _MODULE)


FIX = Fix(id="scan-backward", effect=Effect.ROUNDING, fits=fits, apply=apply, patch=patch)
