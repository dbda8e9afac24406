"""Random small nets with all that is hard to recompute, trained plainly and with save_memory.

    OMP_NUM_THREADS=1 python benchmarks/save_memory_random.py [--nets 20] [--seed 0]

Every net is trained three times: twice plainly, once with one set of options. Losses, gradients,
parameters and buffers of all steps have to be the same to the last bit, and nothing may be raised.
A net whose plain trainings differ or fail is not counted.
"""

from __future__ import annotations

import argparse
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stepscope.fix import save_memory

if TYPE_CHECKING:
    from stepscope.fix.saved import MemorySaver

WIDTH, STEPS = 16, 7
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no warmup": {"warmup": 0},
    "reduce": {"reduce": 0.5},
    "budget": {"budget": 20_000},
    "batch": {"batch": "2x"},
    "slowdown": {"max_slowdown": 0.5},
    "heavy": {"heavy": True},
    "heavy, reduce": {"heavy": True, "reduce": 0.7},
}
Layer = Callable[[torch.Tensor], torch.Tensor]


class RandomNet(nn.Module):
    """Layers over (batch, width); what layers write to lies in `masks`, `arrays` and buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.parts = nn.ModuleList()
        self.weights = nn.ParameterList()
        self.masks: list[torch.Tensor] = []
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.layers: list[tuple[str, Layer]] = []
        for _ in range(self.draw.randint(4, 10)):
            name = self.draw.choice(sorted(LAYERS))
            self.layers.append((name, LAYERS[name](self)))
        self.head = nn.Linear(WIDTH, 4)
        self.returns_more = self.draw.random() < 0.2

    def part(self, module: nn.Module) -> Any:
        """A new module, or one that is used elsewhere."""
        known = [one for one in self.parts if str(one) == str(module)]
        if known and self.draw.random() < 0.25:
            return self.draw.choice(known)
        self.parts.append(module)
        return module

    def weight(self, *shape: int) -> nn.Parameter:
        self.weights.append(nn.Parameter(torch.randn(*shape) * 0.3))
        return self.weights[-1]

    def buffer(self, value: torch.Tensor) -> str:
        name = f"buffer{len(self._buffers)}"
        self.register_buffer(name, value)
        return name

    def forward(self, x: torch.Tensor) -> Any:
        for _, layer in self.layers:
            x = layer(x)
        scores = self.head(x)
        if self.returns_more:
            return scores.float().log_softmax(-1).square(), scores
        return scores, None


def activation(net: RandomNet) -> Layer:
    kinds = nn.ReLU(), nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Softplus(), nn.Hardtanh(), nn.ELU()
    return net.part(net.draw.choice(kinds))


def norm(net: RandomNet) -> Layer:
    affine = net.draw.random() < 0.5
    kinds = nn.BatchNorm1d(WIDTH, affine=affine), nn.LayerNorm(WIDTH), nn.GroupNorm(2, WIDTH)
    return net.part(net.draw.choice(kinds))


def mask(net: RandomNet) -> Layer:
    """A masked weight; the mask is a plain attribute or a buffer."""
    weight, value = net.weight(WIDTH, WIDTH), (torch.rand(WIDTH, WIDTH) > 0.3).float()
    if net.draw.random() < 0.5:
        net.masks.append(value)
        return lambda x: functional.linear(x, weight * value)
    name = net.buffer(value)
    net.masks.append(getattr(net, name))
    return lambda x: (functional.linear(x, weight * getattr(net, name)) + x).tanh()


def array(net: RandomNet) -> Layer:
    """A constant over a numpy array; forward may write to it."""
    values, moves = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32), net.draw.random() < 0.5
    net.arrays.append(values)
    kept = torch.from_numpy(values)

    def layer(x: torch.Tensor) -> torch.Tensor:
        scale = kept.clone() if net.draw_copy else torch.from_numpy(values)
        y = torch.sigmoid(x * scale + kept)
        if moves:
            values[:] = values * np.float32(0.99)
            return y * kept.clone() if net.draw_copy else y.sin()
        return y

    net.draw_copy = net.draw.random() < 0.7 or moves
    return layer


def counter(net: RandomNet) -> Layer:
    name = net.buffer(torch.zeros((), dtype=torch.long))

    def layer(x: torch.Tensor) -> torch.Tensor:
        count = getattr(net, name)
        count += 1
        return (x + count.to(x.dtype)).cos()

    return layer


def moving_mean(net: RandomNet) -> Layer:
    name, assigned = net.buffer(torch.zeros(WIDTH)), net.draw.random() < 0.3

    def layer(x: torch.Tensor) -> torch.Tensor:
        mean = getattr(net, name)
        if net.training and assigned:
            setattr(net, name, mean * 0.9 + 0.1 * x.detach().float().mean(0))
        elif net.training:
            mean.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
        return (x * getattr(net, name).clone()).sigmoid() + x

    return layer


def words(net: RandomNet) -> Layer:
    rows, most = net.draw.choice((30, 3000)), net.draw.choice((None, 0.8))
    table = net.part(nn.Embedding(rows, WIDTH, max_norm=most))
    return lambda x: x + torch.tanh(table((x.detach().float() * 9).long().abs() % 30).mean(1))


def dropout(net: RandomNet) -> Layer:
    drop = net.draw.choice((nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.Dropout(0.4, inplace=True)))
    return lambda x: drop(x + 1)


def in_place(net: RandomNet) -> Layer:
    kind = net.draw.choice(("relu", "add", "mul", "part", "data"))

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.5
        if kind == "relu":
            return functional.relu(y, inplace=True)
        if kind == "add":
            y += x
        elif kind == "mul":
            y.mul_(0.5).tanh_()
        elif kind == "data":
            y.data.mul_(0.7)
        else:
            y[:, 2:5] = 0.25
        return y

    return layer


def views(net: RandomNet) -> Layer:
    turn = net.draw.randint(1, 5)

    def layer(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        y = torch.cat([second.sigmoid() * first, first.clamp(-2, 2).exp()], dim=-1)
        return y.t().roll(turn, 0).t()

    return layer


def attention(net: RandomNet) -> Layer:
    project, name = net.part(nn.Linear(WIDTH, 3 * WIDTH)), net.buffer(torch.ones(64, 64).tril())

    def layer(x: torch.Tensor) -> torch.Tensor:
        query, key, value = project(x).chunk(3, dim=-1)
        rows = x.shape[0]
        scores = (query @ key.t()).masked_fill(getattr(net, name)[:rows, :rows] == 0, -1e4)
        return x + functional.dropout(torch.softmax(scores / 4, -1), 0.1) @ value

    return layer


def checkpointed(net: RandomNet) -> Layer:
    inner = nn.Sequential(net.part(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Dropout(0.2))
    return lambda x: checkpoint(inner, x, use_reentrant=False)


def compiled(net: RandomNet) -> Layer:
    if net.draw.random() < 0.8:  # dynamo takes a second for each
        return linear(net)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
    net.parts.append(inner)
    backend = net.draw.choice(("eager", "aot_eager"))
    if net.draw.random() < 0.5:
        return torch.compile(inner, backend=backend)
    net.parts.append(torch.compile(inner, backend=backend))
    return net.parts[-1]


def scaled(net: RandomNet) -> Layer:
    """Small weights, and one that spectral normalisation divides."""
    gamma, weight = net.weight(WIDTH), net.weight(WIDTH, WIDTH)
    return lambda x: functional.linear(torch.relu(x * gamma), weight / weight.detach().norm())


def hooked(net: RandomNet) -> Layer:
    part = net.part(nn.Linear(WIDTH, WIDTH))
    part.register_forward_hook(lambda *passed: passed[2] * 1.5)
    if net.draw.random() < 0.5:
        part.register_full_backward_hook(lambda _module, grads, _outputs: (grads[0] * 0.5,))
    return part


def linear(net: RandomNet) -> Layer:
    part = net.part(nn.Linear(WIDTH, WIDTH))
    return lambda x: part(x).sin()


LAYERS: dict[str, Callable[[RandomNet], Layer]] = {
    one.__name__: one
    for one in (
        *(activation, norm, mask, array, counter, moving_mean, words, dropout, in_place, views),
        *(attention, checkpointed, compiled, scaled, hooked, linear),
    )
}


class Training:
    """How a net is trained: drawn once, so that every training of it is the same."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed + 1)
        self.autocast = draw.random() < 0.2
        self.forwards = draw.choice((1, 1, 1, 2, 3))
        self.evaluates = draw.random() < 0.2
        self.accumulates = draw.random() < 0.2
        self.freezes = draw.random() < 0.15
        self.ties = draw.random() < 0.15
        self.batches = draw.choice(((32,), (32,), (32, 16)))
        self.touches = draw.choice(("", "", "", "assign", "scale", "array", "weights", "scores"))
        self.momentum = draw.choice((0.0, 0.9))

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value)

    def trained(self, seed: int, options: dict[str, Any] | None) -> Any:
        """Everything that was seen, and the saver."""
        torch.manual_seed(seed)
        net = RandomNet(seed)
        linears = [part for part in net.parts if isinstance(part, nn.Linear)]
        same = [one for one in linears if one.weight.shape == linears[0].weight.shape]
        if self.ties and len(same) > 1:
            same[1].weight = same[0].weight
        saver = None if options is None else save_memory(net, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=self.momentum)
        seen: list[torch.Tensor] = []
        for step in range(STEPS):
            if self.freezes and step == 4:
                next(net.parameters()).requires_grad_(False)
            seen += self.step(net, optimizer, step)
        return [*seen, *net.state_dict().values()], saver

    def step(self, net: RandomNet, optimizer: Any, step: int) -> list[torch.Tensor]:
        if not (self.accumulates and step % 2):
            optimizer.zero_grad()
        losses = []
        for _ in range(self.forwards):
            batch = torch.randn(self.batches[step % len(self.batches)], WIDTH)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
                result, scores = net(batch)
            losses.append(result.float().square().mean())
            if self.touches == "scores" and scores is not None:
                with torch.no_grad():
                    scores.mul_(0.5)
        loss = torch.stack(losses).sum()
        if self.evaluates:
            net.eval()
            with torch.no_grad():
                net(torch.randn(8, WIDTH))
            net.train()
        self.touch(net)
        loss.backward()
        grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        return [loss.detach(), *grads]

    def touch(self, net: RandomNet) -> None:
        """Between forward and backward, without a version counter."""
        for value in net.masks:
            if self.touches == "assign":
                value.data = (torch.rand(value.shape) > 0.4).float()
            elif self.touches == "scale":
                value.data.mul_(0.9)
        for values in net.arrays if self.touches == "array" else ():
            values *= np.float32(0.9)
        for weight in net.weights if self.touches == "weights" else ():
            weight.data.mul_(0.99)


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(
        one.dtype == other.dtype and torch.equal(one.nan_to_num(7.25), other.nan_to_num(7.25))
        for one, other in zip(first, second, strict=True)
    )


def outcome(seed: int, only: str | None) -> tuple[str, str]:
    """What became of one net, and words about it."""
    training, names = Training(seed), list(OPTIONS)
    option = only or names[seed % len(names)]
    words = f"net {seed}, {option}: {training}; " + ", ".join(n for n, _ in RandomNet(seed).layers)
    try:
        plain, again = (training.trained(seed, None)[0] for _ in range(2))
    except Exception as error:
        return "plain training fails", f"{words}: {error}"
    if not same_bits(plain, again):
        return "plain training is not repeatable", words
    try:
        saved, saver = training.trained(seed, OPTIONS[option])
    except Exception:
        return "RAISES", f"{words}\n{traceback.format_exc()}"
    if not same_bits(plain, saved):
        return "DIFFERS", words
    return f"same, {_state(saver)}", "; ".join(saver.notes)


def _state(saver: MemorySaver) -> str:
    if saver.ended is not None:
        return "compiled part left alone" if "compiled" in saver.ended else "OUR FAILURE"
    changes = saver.plan is not None and saver.plan.changes_something()
    return "with a plan" if changes else "nothing to save"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first net")
    parser.add_argument("--options", choices=list(OPTIONS), help="for all nets; else in turn")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for seed in range(chosen.seed, chosen.seed + chosen.nets):
        torch._dynamo.reset()
        kind, words = outcome(seed, chosen.options)
        counts[kind] += 1
        if kind.isupper() or "FAILURE" in kind:
            print(kind, words, flush=True)
        if (seed + 1 - chosen.seed) % 50 == 0 or seed + 1 == chosen.seed + chosen.nets:
            listed = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
            print(f"to seed {seed}: {listed}", flush=True)


if __name__ == "__main__":
    main()
