"""Does the test of losses tell rounding from errors? Small trainings with both, on one CPU core.

    python benchmarks/tune_parity.py [--seeds 3] [--only mlp,transformer]

Each training is repeated with changes of the size of rounding (the last bit of fp32; operands of
products rounded to tf32 or bf16), with other batches, and with planted errors: the learning rate
10% off, one of eight parts of the batch missing from the gradient, the loss scaled by 1.02. The
table says what `check_parity` saw, where the remedy had declared "rounding" (other batches:
"random").
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (as everybody calls it)
from torch.nn.utils import parametrize

from stepscope.verify.parity import Precision, check_parity
from stepscope.verify.trials import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEPS = 60
_BITS = {"tf32": 10, "bf16": 7}  # of the mantissa
_MANTISSA = 23
_TOKENS, _LENGTH, _CLASSES = 32, 24, 10


class RoundedProducts(torch.autograd.Function):
    """A tensor with fewer bits of mantissa, and its gradient likewise."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, values: Tensor, bits: int) -> Tensor:
        context.bits = bits  # type: ignore[attr-defined]
        return round_to(values, bits)

    @staticmethod
    def backward(
        context: torch.autograd.function.FunctionCtx, *gradients: Tensor
    ) -> tuple[Tensor, None]:
        return round_to(gradients[0], context.bits), None  # type: ignore[attr-defined]


def round_to(values: Tensor, bits: int) -> Tensor:
    drop = _MANTISSA - bits
    integers = values.contiguous().view(torch.int32) + (1 << (drop - 1))
    return (integers & -(1 << drop)).view(torch.float32)


class _RoundedWeight(nn.Module):
    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, weight: Tensor) -> Tensor:
        return RoundedProducts.apply(weight, self.bits)  # type: ignore[no-any-return]


def round_products(model: nn.Module, bits: int) -> None:
    """In linear layers and convolutions."""
    for module in list(model.modules()):
        if isinstance(module, nn.Linear | nn.Conv2d):
            parametrize.register_parametrization(module, "weight", _RoundedWeight(bits))
            module.register_forward_pre_hook(
                lambda _, inputs: tuple(RoundedProducts.apply(one, bits) for one in inputs)
            )
            if bits == _BITS["bf16"]:
                module.register_forward_hook(
                    lambda _, __, output: RoundedProducts.apply(output, bits)
                )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 48)
        self.lstm = nn.LSTM(48, 64, batch_first=True)
        self.head = nn.Linear(64, _TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 48)
        self.places = nn.Parameter(0.1 * torch.randn(_LENGTH, 48))
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(48, _TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layers(self.embedding(tokens) + self.places, mask=mask)
        return self.head(hidden)  # type: ignore[no-any-return]


def perceptron(outputs: int = _CLASSES) -> nn.Module:
    return nn.Sequential(
        nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, outputs)
    )


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 12), (12, 24), (24, 24)):
        convolution = nn.Conv2d(before, after, 3, stride=2, padding=1)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, _CLASSES))


def _fixed(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors(batch: int, chance: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    truth = _fixed(1, 40, _CLASSES)
    while True:
        inputs = torch.randn(batch, 40, generator=chance)
        likely = torch.softmax(0.6 * inputs @ truth, -1)
        yield inputs, torch.multinomial(likely, 1, generator=chance)[:, 0]


def waves(batch: int, chance: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    truth = _fixed(1, 40, 1)
    while True:
        inputs = torch.randn(batch, 40, generator=chance)
        noise = 0.3 * torch.randn(batch, 1, generator=chance)
        yield inputs, torch.sin(inputs @ truth) + noise


def images(batch: int, chance: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    classes = _fixed(1, _CLASSES, 3, 16, 16)
    while True:
        labels = torch.randint(_CLASSES, (batch,), generator=chance)
        yield 0.5 * classes[labels] + torch.randn(batch, 3, 16, 16, generator=chance), labels


def texts(batch: int, chance: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    likely = torch.softmax(3 * _fixed(1, _TOKENS, _TOKENS), -1)
    while True:
        tokens = [torch.randint(_TOKENS, (batch, 1), generator=chance)]
        for _ in range(_LENGTH):
            tokens.append(torch.multinomial(likely[tokens[-1][:, 0]], 1, generator=chance))
        text = torch.cat(tokens, 1)
        yield text[:, :-1], text[:, 1:]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, and optimizers from calm to nearly unstable."""

    model: Callable[[], nn.Module]
    data: Callable[[int, torch.Generator], Iterator[tuple[Tensor, Tensor]]]
    optimizers: tuple[tuple[str, float], ...]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            return F.mse_loss(output, target)
        return F.cross_entropy(output.flatten(0, -2), target.flatten())


_COMMON = (("sgd", 0.05), ("sgd", 0.5), ("adam", 1e-3), ("adam", 1e-2))
TASKS = {
    "mlp": Task(model=perceptron, data=vectors, optimizers=_COMMON),
    "regression": Task(
        model=lambda: perceptron(1),
        data=waves,
        optimizers=(("sgd", 0.02), ("sgd", 0.1), ("adam", 1e-3), ("adam", 1e-2)),
    ),
    "convolutions": Task(model=convolutional, data=images, optimizers=_COMMON),
    "recurrent": Task(
        model=Recurrent, data=texts, optimizers=(("sgd", 0.5), ("adam", 2e-3), ("adam", 2e-2))
    ),
    "transformer": Task(
        model=Transformer, data=texts, optimizers=(("sgd", 0.05), ("adam", 1e-3), ("adam", 1e-2))
    ),
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is done to a training, and whether it should pass."""

    name: str
    error: bool = False
    products: str = ""  # tf32 or bf16
    last_bit: bool = False
    other_batches: bool = False
    rate: float = 1.0  # times the learning rate
    missing: bool = False  # an eighth of the batch from the gradient
    scale: float = 1.0  # of the loss

    @property
    def precision(self) -> Precision:
        return {"tf32": "tf32", "bf16": "16 bits"}.get(self.products, "fp32")  # type: ignore[return-value]

    @property
    def declared(self) -> str:
        return "random" if self.other_batches else "rounding"


CHANGES = (
    Change(name="last bit", last_bit=True),
    Change(name="tf32", products="tf32"),
    Change(name="bf16", products="bf16"),
    Change(name="other batches", other_batches=True),
    *(
        replace(error, name=f"{error.name}, {products or 'fp32'}", products=products, error=True)
        for error in (
            Change(name="rate +10%", rate=1.1),
            Change(name="1/8 missing", missing=True),
            Change(name="loss x 1.02", scale=1.02),
        )
        for products in ("", "tf32", "bf16")
    ),
)


def train(
    task: Task, optimizer_name: str, rate: float, batch: int, seed: int, change: Change
) -> dict[int, tuple[Loss, ...]]:
    torch.manual_seed(seed)
    model = task.model()
    chance = torch.Generator().manual_seed(1000 + seed + 500 * change.other_batches)
    batches = task.data(batch, chance)
    bits = torch.Generator().manual_seed(5)
    if change.products:
        round_products(model, _BITS[change.products])
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if optimizer_name == "sgd":
        optimizer = torch.optim.SGD(parameters, rate * change.rate, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(parameters, rate * change.rate)
    losses = []
    for step in range(STEPS):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = change.scale * task.loss(model(inputs), targets)
        if change.missing:
            rest = batch // 8
            part = task.loss(model(inputs[rest:]), targets[rest:])
            (part * (batch - rest) / batch).backward()
        else:
            loss.backward()
        if change.last_bit:
            for parameter in parameters:
                assert parameter.grad is not None
                flips = torch.randint(-1, 2, parameter.shape, generator=bits)
                parameter.grad.mul_(1 + 2.0**-23 * flips)
        optimizer.step()
        losses.append(Loss(step, loss.item().hex()))
    return {0: tuple(losses)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join(TASKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    seen: dict[str, Counter[str]] = {change.name: Counter() for change in CHANGES}
    began = time.monotonic()
    for name in options.only.split(","):
        task = TASKS[name]
        settings = product(task.optimizers, (8, 32), range(options.seeds))
        for (optimizer, rate), batch, seed in settings:
            base = train(task, optimizer, rate, batch, seed, Change(name="baseline"))
            for change in CHANGES:
                after = train(task, optimizer, rate, batch, seed, change)
                found = check_parity(
                    [base, base], [after], declared=change.declared, precision=change.precision
                )
                seen[change.name]["failed" if found.parity == "failed" else "passed"] += 1
                if change.error is not (found.parity == "failed"):
                    where = f"{name}, {optimizer} {rate:g}, batch {batch}, seed {seed}"
                    print(f"  {where}: {change.name} is {found.parity}: {found.why}", flush=True)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"{'change':24}{'passed':>8}{'failed':>8}")
    for change in CHANGES:
        counts = seen[change.name]
        kind = "planted" if change.error else "harmless"
        print(f"{change.name:24}{counts['passed']:>8}{counts['failed']:>8}  {kind}")


if __name__ == "__main__":
    main()
