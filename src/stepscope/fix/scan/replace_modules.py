"""`scan_backward`: modules whose backward pass is a scan in the place of torch's."""

from __future__ import annotations

from typing import Any

from torch import nn

from stepscope.fix.refusal import RefusedError
from stepscope.fix.scan.scan_gated import ScanGRU, ScanLSTM
from stepscope.fix.scan.scan_rnn import ScanRNN
from stepscope.fix.scan.scan_stack import ScanStack, is_plain, what_it_is
from stepscope.records.scan_costs import LARGEST_LSTM


def scan_backward(model: nn.Module, precision: str = "tf32x3") -> nn.Module:
    """Replace torch's RNN, GRU or LSTM, also inside a model, by one whose backward is a scan.

    Parameters stay the same. Inside a model, an LSTM on a CPU and one with a state of more than
    32 on a GPU stay: torch's is the faster one there. `precision` is ScanRNN's.
    """
    if not isinstance(model, nn.Module):
        raise RefusedError(f"scan_backward takes a module, not a {type(model).__name__}")
    if isinstance(model, nn.RNNBase) and _plain_kind(model):
        return _scan_of(model, precision)
    made: dict[nn.Module, ScanStack] = {}  # a module that stands in two places stays one
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and is_replaceable(child):
                if child not in made:
                    made[child] = _scan_of(child, precision)
                setattr(parent, name, made[child])
    if not made:
        raise RefusedError(_nothing_to_replace(model))
    return model


def is_replaceable(module: nn.Module) -> bool:
    """Whether it is a recurrent module as torch has it, where a scan is possible and may pay."""
    kind = _plain_kind(module)
    if kind is not nn.LSTM:
        return kind is not None
    if getattr(module, "proj_size", 0) or _is_on_cpu(module):
        return False
    return int(getattr(module, "hidden_size", 0)) <= LARGEST_LSTM


def _is_on_cpu(module: nn.Module) -> bool:
    return all(one.device.type == "cpu" for one in module.parameters())


def _plain_kind(module: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in (nn.RNN, nn.GRU, nn.LSTM) if is_plain(module, kind)), None)


def _scan_of(module: Any, precision: str) -> ScanStack:
    kind = _plain_kind(module)
    if kind is nn.RNN:
        return ScanRNN.of(module, precision=precision)
    return ScanGRU.of(module) if kind is nn.GRU else ScanLSTM.of(module)


def _nothing_to_replace(model: nn.Module) -> str:
    name, inside = type(model).__name__, list(model.modules())
    if any(isinstance(one, ScanStack) for one in inside):
        return f"every nn.RNN, nn.GRU and nn.LSTM in {name} already uses a scan"
    recurrent = next((one for one in inside if isinstance(one, nn.RNNBase)), None)
    if recurrent is not None:
        return f"there is nothing to replace in {name}: {_why_left(recurrent)}"
    return (
        f"there is no nn.RNN, nn.GRU or nn.LSTM in {name}. Cells that are called step by step "
        "are not replaced"
    )


def _why_left(recurrent: nn.RNNBase) -> str:
    if _plain_kind(recurrent) is not nn.LSTM:
        return f"it has {what_it_is(recurrent)}"
    if recurrent.proj_size:
        return "there is no scan for an nn.LSTM with proj_size"
    if recurrent.hidden_size > LARGEST_LSTM:
        return f"torch's backward is faster through an nn.LSTM of more than {LARGEST_LSTM} numbers"
    return "torch's backward through an nn.LSTM is faster on a CPU. Move the model to its GPU first"
