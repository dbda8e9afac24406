"""What the nets of fuse_random.py are made of: parts, and events between two steps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 6


class Part(nn.Module):
    """Two layers; `forward` is what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen: Any = 0
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.two(torch.tanh(self.one(x)))
        return result


def part(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    """A class with this forward."""
    return type(forward.__name__, (Part,), {"forward": forward})


def calm(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), kind())


def counts(self: Any, x: Any) -> Any:
    self.seen += 1
    return self.two(self.one(x).tanh()) / self.seen


def lists(self: Any, x: Any) -> Any:
    self.seen = [*self.seen, len(x)] if self.seen else [len(x)]
    return self.two(self.one(x)) * len(self.seen) / 4


def appends(self: Any, x: Any) -> Any:
    self.log = getattr(self, "log", [])
    self.log.append(1)
    self.seen = len(self.log)
    return self.one(x) * 0.1 * len(self.log)


def keeps_hidden(self: Any, x: Any) -> Any:
    before = getattr(self, "hidden", None)
    y = self.one(x).tanh()
    self.hidden = y.detach()
    return y if before is None else y + 0.5 * self.two(before)


def assigned(self: Any, x: Any) -> Any:
    y = (self.one(x) * self.scale).sigmoid()
    self.scale = self.scale * 0.9
    return y


def assigned_shape(self: Any, x: Any) -> Any:
    y = self.one(x) * self.scale.mean()
    self.scale = torch.cat([self.scale, self.scale[:1] * 0.5])
    return y


def averaged(self: Any, x: Any) -> Any:
    y = self.one(x)
    self.scale.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return self.two(y - self.scale.clone())


def averaged_alone(self: Any, x: Any) -> Any:
    y = self.one(x) * (1.5 if self.one.bias.sum().item() > 0 else 0.5)
    self.scale = 0.9 * self.scale + 0.1 * y.detach().mean(0)
    return self.two(y - self.scale)


def clamps_weight(self: Any, x: Any) -> Any:
    with torch.no_grad():
        self.one.weight.clamp_(-0.3, 0.3)
    return self.one(x)


def clamps_data(self: Any, x: Any) -> Any:
    self.one.weight.data = self.one.weight.data.clamp(-0.3, 0.3)
    return self.one(x)


def reentrant(self: Any, x: Any) -> Any:
    return checkpoint(lambda y: self.two(self.one(y).tanh()), x, use_reentrant=True)


def recomputed(self: Any, x: Any) -> Any:
    return checkpoint(lambda y: self.two(self.one(y).tanh()), x, use_reentrant=False)


def reentrant_drops(self: Any, x: Any) -> Any:
    def run(y: Any) -> Any:
        return self.two(functional.dropout(self.one(y), 0.3, self.training))

    return checkpoint(run, x, use_reentrant=True)


def hooks_activation(self: Any, x: Any) -> Any:
    y = self.one(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    return self.two(y)


def hooks_node(self: Any, x: Any) -> Any:
    y = self.one(x)
    if y.requires_grad:
        y.grad_fn.register_prehook(lambda gradients: tuple(one * 0.5 for one in gradients))
    return self.two(y)


def no_grad(self: Any, x: Any) -> Any:
    with torch.no_grad():
        weights = torch.softmax(self.one(x), -1)
    return self.two(x) * weights


def inference(self: Any, x: Any) -> Any:
    with torch.inference_mode():
        weights = self.one(x).sigmoid()
    return self.two(x) * weights.clone()


def stops(self: Any, x: Any) -> Any:
    return self.two(self.one(x).detach()) + self.one(x)


def gradient_inside(self: Any, x: Any) -> Any:
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        energy = self.one(y).square().sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=True)
    return self.two(force * 0.1)


def func_grad(self: Any, x: Any) -> Any:
    return torch.func.vmap(torch.func.grad(lambda row: self.one(row).square().sum()))(x) * 0.1


def saved_hooks(self: Any, x: Any) -> Any:
    def pack(tensor: Any) -> Any:
        return tensor / tensor.abs().max(), tensor.abs().max()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda pair: pair[0] * pair[1]):
        return self.two(self.one(x).tanh() ** 2)


def saves_on_cpu(self: Any, x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return self.two(self.one(x).tanh())


def drops(self: Any, x: Any) -> Any:
    return self.two(functional.dropout(self.one(x), 0.4, self.training))


def drops_in_place(self: Any, x: Any) -> Any:
    y = self.one(x)
    functional.dropout(y, 0.4, self.training, inplace=True)
    functional.relu(y, inplace=True)
    return y


def draws(self: Any, x: Any) -> Any:
    return self.one(x) * torch.rand(1) + torch.randn_like(x) * self.two(x)


def draws_otherwise(self: Any, x: Any) -> Any:
    noise = torch.distributions.Normal(self.one(x), 1.0).rsample()
    return self.two(noise) * torch.empty(WIDTH).bernoulli_(0.5)


def draws_late(self: Any, x: Any) -> Any:
    return self.one(x) * torch.tensor([0.0] * WIDTH).uniform_()


def python_random(self: Any, x: Any) -> Any:
    return self.one(x) if random.random() < 0.5 else self.two(x)


def branches(self: Any, x: Any) -> Any:
    return self.one(x) if self.one.weight.sum() > 0 else self.two(x)


def sums_weights(self: Any, x: Any) -> Any:
    return self.one(x) + sum(weight.square().sum() for weight in self.parameters()) * 1e-2


def in_place(self: Any, x: Any) -> Any:
    y = self.one(x)
    y[:, 0].mul_(2)
    y[:, 1:3] += 1
    return self.two(y.clamp_(-1, 1))


def numpy_inside(self: Any, x: Any) -> Any:
    y = self.one(x)
    return y * float(y.detach().numpy().std())


def calls_twice(self: Any, x: Any) -> Any:
    return self.two(self.one(self.one(x).tanh()))


def freezes_itself(self: Any, x: Any) -> Any:
    self.one.eval()
    self.one.requires_grad_(False)
    return self.two(self.one(x))


def leaves_out(self: Any, x: Any) -> Any:
    chosen = (x[:, 0] > 0).nonzero().flatten()
    return self.one(x).index_add(0, chosen, self.two(x[chosen]))


def auxiliary(self: Any, x: Any) -> Any:
    self.extra = self.one(x).square().mean()
    return self.two(x) * self.extra


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * context.saved_tensors[0] ** 2


def own_function(self: Any, x: Any) -> Any:
    return Cube.apply(self.one(x).tanh())


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table((x[:, :3] * 2).long().abs() % 5)
        return found.sum(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.two(torch.tanh(self.one(x)))
        return result


class TiedAlone(Tied):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        return super().forward(x) if y.sum().item() > 0 else y


class Closure(nn.Module):
    """A function of the instance refers to the model from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.act = lambda y: self.one(y).tanh()
        self.alias = self.one.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.act(x) + self.alias
        return result


class Lazily(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one: Any = None
        self.two = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.one is None:
            self.one = nn.Linear(WIDTH, WIDTH)
        result: torch.Tensor = self.two(self.one(x))
        return result


def with_forward_of_its_own() -> nn.Module:
    made = Part()
    made.forward = lambda x: made.one(x) * 2  # type: ignore[method-assign]
    return made


def hooked(register: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = Part()
        register(made)
        return made

    return make


def counting(module: Any, *_: Any) -> None:
    module.seen += 1


def half_of_output(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def half_of_gradient(_module: Any, gradients: Any, *_: Any) -> Any:
    return (gradients[0] * 0.5,)


def halve(weight: Any) -> None:
    weight.grad.mul_(0.5)


def pruned() -> nn.Module:
    made = Part()
    prune.l1_unstructured(made.one, "weight", 0.4)
    return made


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).matmul(self.turn).real * 0.1


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.cell(x[None])[0][0]
        return rows


FORWARDS = (
    counts, lists, appends, keeps_hidden, assigned, assigned_shape, averaged, averaged_alone,
    clamps_weight, clamps_data, reentrant, recomputed, reentrant_drops, hooks_activation,
    hooks_node, no_grad, inference, stops, gradient_inside, func_grad, saved_hooks, saves_on_cpu,
    drops, drops_in_place, draws, draws_otherwise, draws_late, python_random, branches,
    sums_weights, in_place, numpy_inside, calls_twice, freezes_itself, leaves_out, auxiliary,
    own_function,
)  # fmt: skip
PARTS: dict[str, Callable[[], nn.Module]] = {
    **{forward.__name__: part(forward) for forward in FORWARDS},
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": calm(lambda: nn.BatchNorm1d(WIDTH)),
    "norm without weights": calm(lambda: nn.BatchNorm1d(WIDTH, affine=False, momentum=None)),
    "norm of rows": calm(lambda: nn.LayerNorm(WIDTH)),
    "relu in place": calm(lambda: nn.ReLU(inplace=True)),
    "dropout": calm(lambda: nn.Dropout(0.3, inplace=True)),
    "words": Words,
    "words, padded": lambda: Words(padding_idx=0),
    "words, shortened": lambda: Words(max_norm=0.7),
    "words, shortened and padded": lambda: Words(max_norm=0.7, padding_idx=0),
    "words, sparse": lambda: Words(sparse=True),
    "tied": Tied,
    "tied, alone": TiedAlone,
    "closure": Closure,
    "made in forward": Lazily,
    "forward of its own": with_forward_of_its_own,
    "forward hook": hooked(lambda one: one.register_forward_hook(half_of_output)),
    "counting hook": hooked(lambda one: one.register_forward_pre_hook(counting)),
    "backward hook": hooked(lambda one: one.register_full_backward_hook(half_of_gradient)),
    "backward pre-hook": hooked(lambda one: one.register_full_backward_pre_hook(half_of_gradient)),
    "weight hook": hooked(lambda one: one.one.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))),
    "hook after gradients": hooked(
        lambda one: one.one.weight.register_post_accumulate_grad_hook(halve)
    ),
    "pruned": pruned,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "lazy": lambda: nn.LazyLinear(WIDTH),
    "complex": Turn,
    "recurrent": Rows,
}


def freezes(step: int, _place: int, model: Any) -> None:
    if step in (1, 3):
        model.begin.requires_grad_(step == 3)


def freezes_some(step: int, place: int, model: Any) -> None:
    if step == 2 and place == 1:
        model.begin.requires_grad_(False)


def evaluates(step: int, _place: int, model: Any) -> None:
    if step:
        model.parts.train(step % 2 == 0)


def evaluates_one(step: int, place: int, model: Any) -> None:
    if step == 2 and place == 0:
        model.parts[0].eval()


def replaces_data(step: int, _place: int, model: Any) -> None:
    if step == 2:
        model.end.weight.data = model.end.weight.data * 0.5


def halves(step: int, _place: int, model: Any) -> None:
    if step == 1:
        with torch.no_grad():
            model.end.weight.mul_(0.5)


def hooks_later(step: int, _place: int, model: Any) -> None:
    if step == 2:
        model.begin.weight.register_hook(lambda gradient: gradient * 0.5)


def hooks_module_later(step: int, _place: int, model: Any) -> None:
    if step == 2:
        model.end.register_forward_hook(half_of_output)


def counts_on(step: int, place: int, model: Any) -> None:
    for module in model.parts:
        if step == 2 and isinstance(getattr(module, "seen", None), int):
            module.seen += 1 + place % 2


def frozen_from_the_start(step: int, _place: int, model: Any) -> None:
    if step == 0:
        model.parts[0].requires_grad_(False)


events: dict[str, Callable[[int, int, Any], None]] = {
    one.__name__: one
    for one in (
        freezes, freezes_some, evaluates, evaluates_one, replaces_data, halves, hooks_later,
        hooks_module_later, counts_on, frozen_from_the_start,
    )
}  # fmt: skip
