"""ScanRNN, ScanGRU and ScanLSTM, torch's modules with a backward pass of logarithmic depth,
and `scan_backward`, which puts them into a model.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from stepscope.errors import RefusedError
from stepscope.fix.scan.gated_layer import gated_layer
from stepscope.fix.scan.rnn_layer import PRECISIONS, scanned_layer
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
    on_cpu = all(one.device.type == "cpu" for one in module.parameters())
    if getattr(module, "proj_size", 0) or on_cpu:
        return False
    return int(getattr(module, "hidden_size", 0)) <= LARGEST_LSTM


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
    if recurrent is None:
        return (
            f"there is no nn.RNN, nn.GRU or nn.LSTM in {name}. Cells that are called step by step "
            "are not replaced"
        )
    if _plain_kind(recurrent) is not nn.LSTM:
        why = f"it has {what_it_is(recurrent)}"
    elif recurrent.proj_size:
        why = "there is no scan for an nn.LSTM with proj_size"
    elif recurrent.hidden_size > LARGEST_LSTM:
        why = f"torch's backward is faster through an nn.LSTM of more than {LARGEST_LSTM} numbers"
    else:
        why = (
            "torch's backward through an nn.LSTM is faster on a CPU. Move the model to its GPU "
            "first"
        )
    return f"there is nothing to replace in {name}: {why}"


# Stacks of recurrent layers as torch's modules have them: layers, directions, packed sequences.
#
# What a layer computes and how it goes back is up to the modules built on it.


class ScanStack(nn.Module):
    """Takes and gives what a recurrent module of torch does. No subclass of it: torch.compile
    refuses those."""

    replaces: ClassVar[type[nn.RNNBase]]
    parts: ClassVar[int] = 1  # of a state: an LSTM's has two

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self._take(self.replaces(*arguments, **options))

    @classmethod
    def of(cls, rnn: nn.RNNBase, *options: Any, **named: Any) -> Self:
        """With the very parameters of torch's module: its optimizer goes on."""
        if not is_plain(rnn, cls.replaces):
            raise RefusedError(
                f"this takes an nn.{cls.replaces.__name__} itself, not {what_it_is(rnn)}"
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(rnn, *options, **named)
        made.train(rnn.training)
        return made

    def _take(self, rnn: nn.RNNBase) -> None:
        """Weights that torch computes at every call (weight_norm, orthogonal) stay so: by hooks, or
        by a parametrization."""
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

    def _one_layer(
        self, steps: Tensor, initial: Tensor, weights: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """All states of one layer in one direction: as many tensors as a state has parts, the
        outputs first; `initial` has the parts side by side."""
        raise NotImplementedError

    def _joined(self, hx: Any) -> Tensor | None:
        """The initial state with its parts side by side."""
        state: Tensor | None = hx
        return state

    def _parted(self, last: Tensor) -> Any:
        """The last state as torch gives it."""
        return last

    def flatten_parameters(self) -> None:
        """There is nothing to do; scripts call it on torch's module."""

    def reset_parameters(self) -> None:
        """Draw parameters as torch does: uniform, by the size of the state."""
        bound = self.hidden_size**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """List weights as nn.RNN does: of every layer and direction."""
        return [
            self._weights(f"_l{layer}{back}")
            for layer in range(self.num_layers)
            for back in ("", "_reverse")[: 1 + self.bidirectional]
        ]

    def _weights(self, ending: str) -> list[Tensor]:
        names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ()))
        computed = self._modules.get("parametrizations", {})
        return [
            computed[name]() if name in computed else getattr(self, name)
            for name in (kind + ending for kind in names)
        ]

    def extra_repr(self) -> str:
        options = [
            f"{name}={getattr(self, name)!r}"
            for name, usual in self._usual().items()
            if getattr(self, name) != usual
        ]
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *options])

    def _usual(self) -> dict[str, Any]:
        """Options that are told where they differ from this."""
        usual = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0}
        return {**usual, "bidirectional": False}

    def forward(self, input: Any, hx: Any = None) -> Any:
        first = self._joined(hx)
        if isinstance(input, PackedSequence):
            # The padding behind a sequence cannot reach what comes before it.
            steps, lengths = pad_packed_sequence(input)
            states, last = self._layers(
                steps, self._initial(steps, first), lengths=lengths.to(steps.device)
            )
            sorted_already = input.sorted_indices is None
            packed_states = pack_padded_sequence(states, lengths, enforce_sorted=sorted_already)
            return packed_states, self._parted(last)
        alone = input.dim() == 2
        input, first = self.batched(input, first)
        steps = input.transpose(0, 1) if self.batch_first else input
        states, last = self._layers(steps, self._initial(steps, first), lengths=None)
        states = states.transpose(0, 1) if self.batch_first else states
        if alone:
            return states.squeeze(int(not self.batch_first)), self._parted(last.squeeze(1))
        return states, self._parted(last)

    def batched(self, inputs: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A sequence without a batch as a batch of one."""
        if inputs.dim() != 2:
            return inputs, hx
        return inputs.unsqueeze(int(not self.batch_first)), None if hx is None else hx.unsqueeze(1)

    def _initial(self, steps: Tensor, hx: Tensor | None) -> Tensor:
        """Zeros unless they are given; ValueError where shapes do not fit."""
        if steps.dim() != 3 or steps.shape[-1] != self.input_size:
            raise ValueError(
                f"input is [steps, batch, {self.input_size}] or [steps, {self.input_size}], "
                f"or batch first with batch_first=True, not {list(steps.shape)}"
            )
        layers = self.num_layers * (2 if self.bidirectional else 1)
        sizes = (layers, steps.shape[1])
        if hx is None:
            return steps.new_zeros(*sizes, self.parts * self.hidden_size)
        right, given = [*sizes, self.hidden_size], [*hx.shape[:-1], hx.shape[-1] // self.parts]
        if given != right:
            raise ValueError(f"the initial state is {right}, not {given}")
        return hx

    def _layers(
        self, steps: Tensor, initial: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        values, last = steps, list[Tensor]()
        for layer in range(self.num_layers):
            outputs = []
            for reverse in (False, True)[: 1 + self.bidirectional]:
                first = initial[len(last)]
                states, end = self._one_way(values, first, layer, reverse, lengths)
                outputs.append(states)
                last.append(end)
            values = torch.cat(outputs, -1) if len(outputs) == 2 else outputs[0]
            if self.dropout and layer < self.num_layers - 1:
                values = nn.functional.dropout(values, self.dropout, self.training)
        return values, torch.stack(last) if len(last) > 1 else last[0].unsqueeze(0)

    def _one_way(
        self, values: Tensor, initial: Tensor, layer: int, reverse: bool, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weights = self._weights(f"_l{layer}{'_reverse' if reverse else ''}")
        given = _reversed(values, lengths) if reverse else values
        # In the weights' precision, under autocast too: states that go around thousands of times
        # are not rounded to 16 bits.
        kind, device = weights[0].dtype, values.device.type
        casts = torch.is_autocast_enabled(device)
        if values.dtype != kind and not casts:
            raise ValueError(
                f"input is {values.dtype} and the weights are {kind}. Convert one of them"
            )
        with torch.autocast(device, enabled=False) if casts else nullcontext():
            parts = self._one_layer(
                given.to(kind).contiguous(),
                initial.to(kind).contiguous(),
                [*weights, *[None] * (4 - len(weights))],
            )
        ends = [part[-1] if lengths is None else _at(part, lengths - 1) for part in parts]
        end = torch.cat(ends, -1) if len(ends) > 1 else ends[0]
        return (_reversed(parts[0], lengths) if reverse else parts[0]), end


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether it is this module as torch has it; its weights may be parametrized. What a subclass
    of a script's own does is not known."""
    own = type(module)
    return (own.__bases__[0] if is_parametrized(module) else own) is kind


def what_it_is(model: Any) -> str:
    """For a refusal."""
    name = type(model).__name__
    for kind in (nn.RNN, nn.GRU, nn.LSTM):
        if isinstance(model, kind) and not is_plain(model, kind):
            scan = f"Scan{kind.__name__}"
            return f"{name}, a subclass whose own code would be lost. Build a {scan} in it"
    return name


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


# `ScanRNN`: nn.RNN with a backward pass of logarithmic depth. State dicts are interchangeable.


class ScanRNN(ScanStack):
    """Takes and gives what nn.RNN does.

    `precision` is that of a GPU's products in backward: "fp32", "tf32x3" (about as exact, on tensor
    cores), "tf32" or "bf16".
    """

    replaces = nn.RNN

    def __init__(self, *arguments: Any, precision: str = "tf32x3", **options: Any) -> None:
        nn.Module.__init__(self)
        self._take(nn.RNN(*arguments, **options), precision)

    def _take(self, rnn: Any, precision: str = "tf32x3") -> None:
        if precision not in PRECISIONS:
            raise RefusedError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
        self.precision, self.nonlinearity = precision, rnn.nonlinearity
        super()._take(rnn)

    def _one_layer(
        self, steps: Tensor, initial: Tensor, weights: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        tanh = self.nonlinearity == "tanh"
        return (scanned_layer(steps, initial, *weights, tanh, self.precision),)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.precision!r}"

    def _usual(self) -> dict[str, Any]:
        return super()._usual() | {"nonlinearity": "tanh"}

    def states_by_layer(
        self, inputs: Tensor, hx: Tensor | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's and direction's states in the order of its own steps, and its
        recurrent weight. Dropout between layers is left out."""
        steps = inputs.transpose(0, 1) if self.batch_first else inputs
        initial = self._initial(steps, hx)
        layers: list[tuple[Tensor, Tensor]] = []
        for layer in range(self.num_layers):
            outputs = []
            for reverse in (False, True)[: 1 + self.bidirectional]:
                states, _ = self._one_way(steps, initial[len(layers)], layer, reverse, None)
                outputs.append(states)
                weight = self._weights(f"_l{layer}{'_reverse' if reverse else ''}")[1]
                layers.append((states.flip(0).contiguous() if reverse else states, weight))
            steps = torch.cat(outputs, -1)
        return layers


# `ScanGRU` and `ScanLSTM`: torch's modules with a backward pass of logarithmic depth.
#
# State dicts are interchangeable. Products in backward are those of float32, without TF32.


class ScanGRU(ScanStack):
    """Takes and gives what nn.GRU does."""

    replaces = nn.GRU

    def _one_layer(
        self, steps: Tensor, initial: Tensor, weights: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        states, _ = gated_layer(steps, initial, *weights, "gru")
        return (states,)


class ScanLSTM(ScanStack):
    """Takes and gives what nn.LSTM does, but for proj_size."""

    replaces = nn.LSTM
    parts = 2

    def _take(self, rnn: nn.RNNBase) -> None:
        if rnn.proj_size:
            raise RefusedError(
                f"there is no scan for an nn.LSTM with proj_size={rnn.proj_size}. Leave it "
                "unchanged, or project its outputs with an nn.Linear"
            )
        super()._take(rnn)

    def _one_layer(
        self, steps: Tensor, initial: Tensor, weights: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        states, cells = gated_layer(steps, initial, *weights, "lstm")
        return states, cells

    def _joined(self, hx: Any) -> Tensor | None:
        if hx is None:
            return None
        if not isinstance(hx, (tuple, list)) or len(hx) != 2 or hx[0].shape != hx[1].shape:
            raise ValueError("the initial state of an LSTM is a pair, (h_0, c_0), of one shape")
        return torch.cat(tuple(hx), -1)

    def _parted(self, last: Tensor) -> Any:
        output, cell = last.split(self.hidden_size, -1)
        return output.contiguous(), cell.contiguous()
