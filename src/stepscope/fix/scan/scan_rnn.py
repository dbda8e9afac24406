"""`ScanRNN`: nn.RNN with a backward pass of logarithmic depth. State dicts are interchangeable."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from stepscope.fix.refusal import RefusedError
from stepscope.fix.scan.rnn_layer import PRECISIONS, scanned_layer

if TYPE_CHECKING:
    from torch import Tensor


class ScanRNN(nn.Module):
    """Takes and gives what nn.RNN does. No subclass of it: torch.compile refuses those.

    `precision` is that of a GPU's products in backward: "fp32", "tf32x3" (about as exact, on tensor
    cores), "tf32" or "bf16".
    """

    def __init__(self, *arguments: Any, precision: str = "tf32x3", **options: Any) -> None:
        super().__init__()
        self._take(nn.RNN(*arguments, **options), precision)

    @classmethod
    def of(cls, rnn: nn.RNN, precision: str = "tf32x3") -> ScanRNN:
        """With the very parameters of an nn.RNN: its optimizer goes on."""
        if not is_plain_rnn(rnn):
            raise RefusedError(f"this takes an nn.RNN itself, not {_what_it_is(rnn)}")
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(rnn, precision)
        made.train(rnn.training)
        return made

    def _take(self, rnn: nn.RNN, precision: str) -> None:
        """Weights that torch computes at every call (weight_norm, orthogonal) stay so: by hooks, or
        by a parametrization."""
        if precision not in PRECISIONS:
            raise RefusedError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
        self.precision, self.nonlinearity = precision, rnn.nonlinearity
        self.input_size, self.hidden_size = rnn.input_size, rnn.hidden_size
        self.num_layers, self.bias, self.dropout = rnn.num_layers, rnn.bias, rnn.dropout
        self.batch_first, self.bidirectional = rnn.batch_first, rnn.bidirectional
        for name, parameter in rnn.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in rnn.named_children():
            self.add_module(name, child)
        for name, registered in vars(rnn).items():
            if "_hook" in name:  # the very dictionaries: their handles still remove them
                setattr(self, name, registered)

    def flatten_parameters(self) -> None:
        """There is nothing to do; scripts call it on an nn.RNN."""

    def reset_parameters(self) -> None:
        """As nn.RNN does: uniform, by the size of the state."""
        bound = self.hidden_size**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """As nn.RNN lists them: of every layer and direction."""
        endings = [
            f"_l{layer}{back}"
            for layer in range(self.num_layers)
            for back in ("", "_reverse")[: 1 + self.bidirectional]
        ]
        return [self._weights(ending) for ending in endings]

    def _weights(self, ending: str) -> list[Tensor]:
        names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ()))
        computed = self._modules.get("parametrizations", {})
        return [
            computed[name]() if name in computed else getattr(self, name)
            for name in (kind + ending for kind in names)
        ]

    def extra_repr(self) -> str:
        usual: dict[str, Any] = {
            "num_layers": 1,
            "bias": True,
            "batch_first": False,
            "dropout": 0.0,
        }
        usual |= {"bidirectional": False, "nonlinearity": "tanh"}
        told = [
            f"{name}={getattr(self, name)!r}"
            for name in usual
            if getattr(self, name) != usual[name]
        ]
        return ", ".join(
            [f"{self.input_size}, {self.hidden_size}", *told, f"precision={self.precision!r}"]
        )

    def forward(self, input: Any, hx: Tensor | None = None) -> Any:
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx)
        alone = input.dim() == 2
        input, hx = self.batched(input, hx)
        steps = input.transpose(0, 1) if self.batch_first else input
        states, last = self._layers(steps, self._initial(steps, hx), lengths=None)
        states = states.transpose(0, 1) if self.batch_first else states
        if alone:
            return states.squeeze(int(not self.batch_first)), last.squeeze(1)
        return states, last

    def batched(self, inputs: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A sequence without a batch as a batch of one."""
        if inputs.dim() != 2:
            return inputs, hx
        return (
            inputs.unsqueeze(int(not self.batch_first)),
            None if hx is None else hx.unsqueeze(1),
        )

    def _forward_packed(self, packed: PackedSequence, hx: Tensor | None) -> Any:
        """The padding behind a sequence cannot reach what comes before it."""
        steps, lengths = pad_packed_sequence(packed)
        states, last = self._layers(
            steps, self._initial(steps, hx), lengths=lengths.to(steps.device)
        )
        sorted_already = packed.sorted_indices is None
        return pack_padded_sequence(states, lengths, enforce_sorted=sorted_already), last

    def states_by_layer(
        self, inputs: Tensor, hx: Tensor | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Of a batch: each layer's and direction's states in the order of its own steps, and its
        recurrent weight. Dropout between layers is left out."""
        steps = inputs.transpose(0, 1) if self.batch_first else inputs
        initial, directions = self._initial(steps, hx), 2 if self.bidirectional else 1
        found = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(directions):
                first, back = initial[layer * directions + direction], direction == 1
                states, _ = self._one_way(steps, first, layer, back, None)
                outputs.append(states)
                weight = self._weights(f"_l{layer}{'_reverse' if back else ''}")[1]
                found.append((_turned(states, back), weight))
            steps = torch.cat(outputs, -1)
        return found

    def _initial(self, steps: Tensor, hx: Tensor | None) -> Tensor:
        """Zeros unless they are given; ValueError where shapes do not fit."""
        if steps.dim() != 3 or steps.shape[-1] != self.input_size:
            raise ValueError(
                f"input is [steps, batch, {self.input_size}] or [steps, {self.input_size}], "
                f"batch first if so asked, not {list(steps.shape)}"
            )
        layers = self.num_layers * (2 if self.bidirectional else 1)
        shape = (layers, steps.shape[1], self.hidden_size)
        if hx is None:
            return steps.new_zeros(shape)
        if tuple(hx.shape) != shape:
            raise ValueError(f"the initial state is {list(shape)}, not {list(hx.shape)}")
        return hx

    def _layers(
        self, steps: Tensor, initial: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        values, last = steps, []
        directions = 2 if self.bidirectional else 1
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(directions):
                first = initial[layer * directions + direction]
                states, end = self._one_way(values, first, layer, direction == 1, lengths)
                outputs.append(states)
                last.append(end)
            values = torch.cat(outputs, -1) if directions == 2 else outputs[0]
            if self.dropout and layer < self.num_layers - 1:
                values = nn.functional.dropout(values, self.dropout, self.training)
        return values, torch.stack(last) if len(last) > 1 else last[0].unsqueeze(0)

    def _one_way(
        self, values: Tensor, initial: Tensor, layer: int, reverse: bool, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weights = self._weights(f"_l{layer}{'_reverse' if reverse else ''}")
        given = _reversed(values, lengths) if reverse else values
        states = _in_precision_of_weights(
            given, initial, [*weights, *[None] * (4 - len(weights))],
            self.nonlinearity == "tanh", self.precision,
        )  # fmt: skip
        end = states[-1] if lengths is None else _at(states, lengths - 1)
        return (_reversed(states, lengths) if reverse else states), end


def scan_backward(model: nn.Module, precision: str = "tf32x3") -> nn.Module:
    """A ScanRNN in the place of an nn.RNN, or of every nn.RNN inside a model: same parameters."""
    if not isinstance(model, nn.Module):
        raise RefusedError(f"scan_backward takes a module, not a {type(model).__name__}")
    if is_plain_rnn(model):
        return ScanRNN.of(model, precision)
    made: dict[nn.Module, ScanRNN] = {}  # a module that stands in two places stays one
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and is_plain_rnn(child):
                if child not in made:
                    made[child] = ScanRNN.of(child, precision)
                setattr(parent, name, made[child])
    if not made:
        raise RefusedError(_nothing_to_replace(model))
    return model


def is_plain_rnn(module: nn.Module) -> TypeGuard[nn.RNN]:
    """Whether it is an nn.RNN as torch has it; its weights may be parametrized. What a subclass of
    a script's own does is not known."""
    kind = type(module)
    return (kind.__bases__[0] if is_parametrized(module) else kind) is nn.RNN


def _what_it_is(model: Any) -> str:
    name = type(model).__name__
    if isinstance(model, nn.RNN):
        return f"{name}, a subclass whose own code would be lost: build a ScanRNN in it"
    if isinstance(model, nn.RNNBase):
        return f"{name}: there is no scan for it (docs/scan.md)"
    return name


def _nothing_to_replace(model: nn.Module) -> str:
    name, inside = type(model).__name__, list(model.modules())
    if any(isinstance(one, ScanRNN) for one in inside):
        return f"every nn.RNN in {name} goes back by a scan already"
    recurrent = next((one for one in inside if isinstance(one, nn.RNNBase)), None)
    if recurrent is not None:
        return f"there is no plain nn.RNN in {name}, but {_what_it_is(recurrent)}"
    return f"there is no nn.RNN in {name}; cells called step by step are not replaced"


def _in_precision_of_weights(
    values: Tensor, initial: Tensor, weights: list[Any], tanh: bool, precision: str
) -> Tensor:
    """Under autocast too: states that go around thousands of times are not rounded to 16 bits."""
    kind, device = weights[0].dtype, values.device.type
    casts = torch.is_autocast_enabled(device)
    if values.dtype != kind and not casts:
        raise ValueError(f"input is {values.dtype} and the weights are {kind}: convert one of them")
    with torch.autocast(device, enabled=False) if casts else nullcontext():
        return scanned_layer(
            values.to(kind).contiguous(), initial.to(kind).contiguous(), *weights, tanh, precision
        )


def _turned(values: Tensor, back: bool) -> Tensor:
    return values.flip(0).contiguous() if back else values


def _reversed(values: Tensor, lengths: Tensor | None) -> Tensor:
    """Each sequence from its own end; what is behind it stays."""
    if lengths is None:
        return values.flip(0)
    places = torch.arange(len(values), device=values.device).unsqueeze(1)
    turned = torch.where(places < lengths, lengths - 1 - places, places)
    return values.gather(0, turned.unsqueeze(-1).expand_as(values))


def _at(states: Tensor, places: Tensor) -> Tensor:
    chosen = places.view(1, -1, 1).expand(1, states.shape[1], states.shape[2])
    return states.gather(0, chosen).squeeze(0)
