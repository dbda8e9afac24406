"""Ways to train B models of a case: one at a time, fused, vmapped, on streams, in processes.

Each way gives a function that trains all of its models once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from stepscope.bench.workload import TrainingPlace
from stepscope.fix.fuse import CapturedStep, ModelArray, fuse

if TYPE_CHECKING:
    from fuse_models import Batch, FuseCase, TrainableNet

TrainAll = Callable[[], Any]


@dataclass(frozen=True)
class Setup:
    """What is trained, where and how exactly."""

    case: FuseCase
    device: torch.device
    dtype: str  # "fp32" | "bf16"
    tiny: bool
    drops: bool = True  # False: dropout is off

    def nets(self, seed: int) -> tuple[nn.Module, ...]:
        torch.manual_seed(seed)
        with self.device:  # a GPU draws first weights a hundred times faster
            built = self.case.build(self.case.config(self.tiny))
        for layer in (one for net in built for one in net.modules() if not self.drops):
            if isinstance(layer, _DropoutNd):
                layer.p = 0.0
            elif isinstance(layer, nn.MultiheadAttention):
                layer.dropout = 0.0
        return tuple(net.to(self.device) for net in built)

    def batch(self, seed: int) -> Batch:
        place = TrainingPlace(self.device, seed=seed)
        return self.case.batch(self.case.config(self.tiny), place)

    def optimizer(self, net: nn.Module, model: int) -> torch.optim.Optimizer:
        """Every model has a rate of its own, as in a search."""
        return self.case.optimize(net, 1 + 0.01 * model)

    def precision(self) -> AbstractContextManager[Any]:
        if self.dtype == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()


class AloneNet:
    """One model's net."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, setup: Setup) -> None:
        self.net, self._optimizer, self._setup = net, optimizer, setup
        self.forward: Callable[..., Any] = net

    def compute(self, function: Callable[..., Any], *inputs: Any) -> Any:
        with self._setup.precision():
            return function(*inputs)

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def backward(self, loss: Any) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()

    def learn(self, wanted: bool) -> None:
        self.net.requires_grad_(wanted)


class FusedNet:
    """An array's nets."""

    def __init__(self, array: ModelArray, setup: Setup, compiled: bool) -> None:
        self.array, self._setup, self._compiled = array, setup, compiled
        self._functions: dict[Any, Callable[..., Any]] = {}

    def compute(self, function: Callable[..., Any], *inputs: Any) -> Any:
        with self._setup.precision():
            if not self._compiled:
                return self.array.apply_each(function, *inputs)
            code = getattr(function, "__code__", function)  # a lambda is a new one in every step
            if code not in self._functions:
                self._functions[code] = self.array.compile(function)
            return self._functions[code](*inputs)

    def __call__(self, *inputs: Any) -> Any:
        return self.array(*inputs)

    def zero_grad(self) -> None:
        self.array.zero_grad()

    def backward(self, loss: Any) -> None:
        self.array.backward(loss)

    def step(self) -> None:
        with torch.profiler.record_function("step of all models"):
            self.array.step()

    def learn(self, wanted: bool) -> None:
        self.array.requires_grad_(wanted)


class EachModels:
    """A tensor with the models in front."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class VmapNet:
    """torch.func: stacked weights, vmap of the forward pass, one optimizer with one rate.

    Under autocast vmap's norms and convolutions fail (torch 2.11): in bf16 weights, buffers and
    inputs are cast before, which costs less than autocast would.
    """

    def __init__(self, nets: Sequence[nn.Module], setup: Setup) -> None:
        self._setup, self._net = setup, nets[0]
        params, buffers = torch.func.stack_module_state(list(nets))
        self._params = {name: one.detach().requires_grad_() for name, one in params.items()}
        self._kind = torch.bfloat16 if setup.dtype == "bf16" else torch.float32
        self._buffers = {name: self._cast(one) for name, one in buffers.items()}
        holder = nn.ParameterList(self._params.values())
        self._optimizer = setup.case.optimize(holder, 1.0)
        self._params = dict(zip(self._params, holder.parameters(), strict=True))
        self._own: Any = None

    def compute(self, function: Callable[..., Any], *inputs: Any) -> Any:
        given = (one.tensor if isinstance(one, EachModels) else one for one in inputs)
        values = [self._cast(one) for one in given]
        params = {name: self._cast(one) for name, one in self._params.items()}

        def one_model(params: Any, buffers: Any, *own: Any) -> Any:
            self._own = (params, buffers)
            return function(*own)

        mapped = torch.vmap(one_model, randomness="different")
        return EachModels(mapped(params, self._buffers, *values))

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._kind) if value.is_floating_point() else value

    def __call__(self, *inputs: Any) -> Any:
        return torch.func.functional_call(self._net, self._own, inputs)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def backward(self, loss: EachModels) -> None:
        loss.tensor.sum().backward()

    def step(self) -> None:
        self._optimizer.step()

    def learn(self, wanted: bool) -> None:
        for one in self._params.values():
            one.requires_grad_(wanted)


def alone(setup: Setup, _: int = 1, *, compiled: bool = False, graphed: bool = False) -> TrainAll:
    """One model: all would train so, one after another."""
    nets = setup.nets(0)
    trained = [AloneNet(net, setup.optimizer(net, 0), setup) for net in nets]
    batch = setup.batch(0)
    if graphed and setup.device.type == "cuda":
        for net in trained:
            for group in net._optimizer.param_groups:
                group["capturable"] = True
    if compiled:
        torch._dynamo.reset()
        for net in trained:
            net.forward = torch.compile(net.net, dynamic=False)
    return _whole_step(setup, trained, batch, graphed)


def fused(setup: Setup, models: int, *, compiled: bool = False, graphed: bool = False) -> TrainAll:
    return _whole_step(setup, *fused_nets(setup, models, compiled), graphed)


def fused_nets(setup: Setup, models: int, compiled: bool = False, draws: Any = "together") -> Any:
    """The arrays' nets, and every model's batch."""
    if compiled:
        torch._dynamo.reset()
    by_model = [setup.nets(model) for model in range(models)]
    nets = []
    for place in range(len(by_model[0])):
        own = [every[place] for every in by_model]
        optimizers = [setup.optimizer(net, model) for model, net in enumerate(own)]
        array = fuse(own, optimizers, seeds=list(range(models)), draws=draws)
        nets.append(FusedNet(array, setup, compiled))
    batches = [setup.batch(model) for model in range(models)]
    joined = tuple(nets[0].array.stack(list(values)) for values in zip(*batches, strict=True))
    return nets, joined


def vmapped(setup: Setup, models: int) -> TrainAll:
    by_model = [setup.nets(model) for model in range(models)]
    nets = [VmapNet(own, setup) for own in zip(*by_model, strict=True)]
    batches = [setup.batch(model) for model in range(models)]
    joined = tuple(EachModels(torch.stack(values)) for values in zip(*batches, strict=True))
    return lambda: setup.case.step(nets, joined)


def streamed(setup: Setup, models: int) -> TrainAll:
    """Every model has a CUDA stream of its own; the host serves them in turn."""
    every = [alone(setup, 1) for _ in range(models)]
    if setup.device.type != "cuda":
        return lambda: [train() for train in every]
    streams = [torch.cuda.Stream() for _ in every]

    def train_all() -> None:
        current = torch.cuda.current_stream()
        for train, stream in zip(every, streams, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                train()
        for stream in streams:
            current.wait_stream(stream)

    return train_all


def _whole_step(
    setup: Setup, nets: Sequence[TrainableNet], batch: Batch, graphed: bool
) -> TrainAll:
    if not graphed:
        return lambda: setup.case.step(nets, batch)
    arrays = [net.array for net in nets if isinstance(net, FusedNet)]
    return CapturedStep(lambda: setup.case.step(nets, batch), arrays, device=setup.device)


WAYS: dict[str, Callable[[Setup, int], TrainAll]] = {
    "serial eager": alone,
    "serial compiled": lambda setup, models: alone(setup, models, compiled=True),
    "serial graphed": lambda setup, models: alone(setup, models, graphed=True),
    "serial compiled+graphed": lambda setup, models: alone(
        setup, models, compiled=True, graphed=True
    ),
    "fused": fused,
    "fused+graph": lambda setup, models: fused(setup, models, graphed=True),
    "fused+compile": lambda setup, models: fused(setup, models, compiled=True),
    "fused+compile+graph": lambda setup, models: fused(setup, models, compiled=True, graphed=True),
    "vmap": vmapped,
    "streams": streamed,
}
SERIAL = tuple(name for name in WAYS if name.startswith("serial"))
