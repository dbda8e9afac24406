"""Recommend a backward pass for a recurrence of this shape on this device: torch's own, the
scan, or fewer steps.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepscope.fix.choice_cache import ChoiceCache
from stepscope.fix.scan.modules import ScanGRU, ScanLSTM, ScanRNN
from stepscope.fix.scan.rnn_layer import backward_states
from stepscope.text.figures import factor, milliseconds

# Both are measured once on the device, in turns, forward and backward together, and kept for later
# (choice_cache.py). A truncated pass needs no measuring: it is what torch does, over fewer steps.

WORTH = 1.05  # times as fast: less is not worth another module
_MODULES: dict[str, tuple[Any, dict[str, str], Any]] = {
    "tanh": (nn.RNN, {"nonlinearity": "tanh"}, ScanRNN),
    "relu": (nn.RNN, {"nonlinearity": "relu"}, ScanRNN),
    "gru": (nn.GRU, {}, ScanGRU),
    "lstm": (nn.LSTM, {}, ScanLSTM),
}
_ROUNDS = 7
_LEAST_S = 0.02


class RnnShape(NamedTuple):
    """Steps, sequences and the state's size; `features` of an input."""

    steps: int
    batch: int
    size: int
    features: int
    cell: str = "tanh"  # or "relu": a plain RNN's; "gru", "lstm"


@dataclass(frozen=True, slots=True)
class ScanAdvice:
    """`choice` is "torch", "scan" or "truncate"; times are of forward and backward together."""

    choice: str
    torch_ms: float
    scan_ms: float
    why: str

    def __str__(self) -> str:
        return f"{self.choice}: {self.why}"


def recommend(
    steps: int,
    batch: int,
    size: int,
    *,
    features: int | None = None,
    cell: str = "rnn",
    nonlinearity: str = "tanh",
    device: torch.device | str | None = None,
    horizon: GradientHorizon | None = None,
) -> ScanAdvice:
    """Time one layer with and without a scan on this device, and recommend one.

    `cell` is "rnn", "gru" or "lstm". Give `gradient_horizon(rnn, inputs)` of a
    plain RNN too: where few steps matter, truncation beats both. Takes a second the first time."""
    kind = nonlinearity if cell == "rnn" else cell
    shape = RnnShape(steps, batch, size, size if features is None else features, kind)
    for name in ("steps", "batch", "size", "features"):
        value = getattr(shape, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is a whole number from 1 on, not {value!r}")
    if shape.cell not in _MODULES:
        raise ValueError(
            f"cell is rnn (nonlinearity tanh or relu), gru or lstm, not {shape.cell!r}"
        )
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device to measure on")
    return _advice(*_times(shape, place), horizon)


def _advice(torch_ms: float, scan_ms: float, horizon: GradientHorizon | None) -> ScanAdvice:
    speed_up = torch_ms / scan_ms
    pace = (
        f"forward and backward take {milliseconds(torch_ms)} with torch, "
        f"{milliseconds(scan_ms)} with the scan"
    )
    if horizon is not None and horizon.truncation_pays:
        return ScanAdvice("truncate", torch_ms, scan_ms, f"{horizon}; all of them: {pace}")
    if speed_up >= WORTH:
        return ScanAdvice("scan", torch_ms, scan_ms, f"{factor(speed_up)} times as fast; {pace}")
    return ScanAdvice("torch", torch_ms, scan_ms, f"the scan is not worth it here: {pace}")


def _times(shape: RnnShape, device: torch.device) -> tuple[float, float]:
    cache = ChoiceCache.of_device("scan", device)
    key = " ".join(map(str, shape))
    try:
        torch_ms, scan_ms = map(float, json.loads(cache.get(key) or "null"))
    except (TypeError, ValueError):
        torch_ms = scan_ms = 0.0
    if torch_ms <= 0 or scan_ms <= 0:
        torch_ms, scan_ms = _measure(shape, device)
        cache.put(key, json.dumps((torch_ms, scan_ms)))
    return torch_ms, scan_ms


def _measure(shape: RnnShape, device: torch.device) -> tuple[float, float]:
    """Medians of rounds that take turns. The training's random numbers stay as they are."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        make, options, scan = _MODULES[shape.cell]
        plain = make(shape.features, shape.size, device=device, **options)
        inputs = torch.randn(shape.steps, shape.batch, shape.features, device=device)
        gradient = torch.randn(shape.steps, shape.batch, shape.size, device=device)

        def train(rnn: nn.Module) -> None:
            rnn.zero_grad()
            rnn(inputs)[0].backward(gradient)

        modules = (plain, scan.of(plain))
        for rnn in modules:  # compiles, and chooses kernels
            train(rnn)
        rounds = [[_ms(partial(train, rnn), device) for rnn in modules] for _ in range(_ROUNDS)]
    torch_ms, scan_ms = (statistics.median(times) for times in zip(*rounds, strict=True))
    return torch_ms, scan_ms


def _ms(train: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < _LEAST_S:
        train()
        _wait(device)
        count += 1
    return (time.perf_counter() - began) / count * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# How far back the gradient of a recurrence reaches: look at this before anything is made faster.
#
# Where only the last few dozen of thousands of steps carry a gradient that a float can tell from
# zero, truncated backpropagation gives the same training for less than any scan.

SHARE = 1e-7  # of the largest gradient: what a float of 32 bits can still add to it
_PROBES = 4


@dataclass(frozen=True, slots=True)
class GradientHorizon:
    """Steps back from the one whose loss it is, of so many that there were."""

    steps: int
    of: int
    share: float

    @property
    def truncation_pays(self) -> bool:
        """Less than half of the steps matter."""
        return 2 * self.steps < self.of

    def __str__(self) -> str:
        what = f"{self.steps} of {self.of} steps carry more than {self.share:g} of the gradient"
        if not self.truncation_pays:
            return what
        return f"{what}: truncate backpropagation to {2 * self.steps} steps"


def gradient_horizon(
    rnn: nn.RNN | Any, inputs: Tensor, hx: Tensor | None = None, share: float = SHARE
) -> GradientHorizon:
    """Measure how many steps back a gradient reaches that enters a plain RNN at its last step.

    `inputs` is a batch as training has it. Several random gradients are sent back; what counts is
    the largest of them, the batch and the layers. Where the gradient grows out of the range of a
    float on its way, every step counts.
    """
    if not 0 < share < 1:
        raise ValueError(f"share is between 0 and 1, not {share:g}")
    if not isinstance(inputs, torch.Tensor):
        raise ValueError(
            f"inputs are a padded batch, a tensor, not a {type(inputs).__name__}. A sequence "
            "of full length shows how far its gradient reaches"
        )
    with torch.no_grad():
        # Every layer's states in the order of its own steps, with its recurrent weight.
        model = rnn if isinstance(rnn, ScanRNN) else ScanRNN.of(rnn)
        states = model.states_by_layer(*model.batched(inputs, hx))
    if not all(bool(layer.isfinite().all()) for layer, _ in states):
        raise ValueError("not all states are finite. Check the inputs and the forward pass")
    reach = max(
        _reach(layer, weight, rnn.nonlinearity == "tanh", share) for layer, weight in states
    )
    return GradientHorizon(reach, len(states[0][0]), share)


def _reach(states: Tensor, weight: Tensor, tanh: bool, share: float) -> int:
    gradient = torch.zeros_like(states)
    largest = torch.zeros(len(states), device=states.device, dtype=states.dtype)
    generator = torch.Generator(states.device).manual_seed(0)
    for _ in range(_PROBES):
        gradient[-1].normal_(generator=generator)
        reached, _ = backward_states(gradient, states, weight, tanh=tanh)
        largest = torch.maximum(largest, reached.flatten(1).abs().amax(1))
    if not largest.isfinite().all():
        return len(states)
    counts = (largest > share * largest.max()).nonzero()
    return len(states) - int(counts[0]) if len(counts) else 0
