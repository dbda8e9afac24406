"""Train random nets fused and each alone in float64: the same, refused, or a difference.

    python benchmarks/fuse_random.py --nets 1000 --seed 0

The parts of a net do what strangers' code does: hooks, counters, buffers that are assigned,
checkpoints, gradients in forward, weights that are tied, frozen, pruned or changed on the way.
"""

from __future__ import annotations

import argparse
import copy
import random
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

from fuse_random_parts import PARTS, WIDTH, events
from stepscope.errors import StepscopeError
from stepscope.fix.fuse import fuse

STEPS = 4
PERTURBED = 1e-13  # relative: what rounding changes, enlarged by training
SLACK = 1e3


class Plan(NamedTuple):
    """One net's training."""

    parts: tuple[str, ...]
    models: int
    optimizer: str
    shared: bool
    events: tuple[str, ...]


class Outcome(NamedTuple):
    kind: str  # same, refused, fails alone, differs, raises
    words: str
    plan: Plan


def random_plan(seed: int) -> Plan:
    draw = random.Random(seed)
    parts = tuple(draw.choice(list(PARTS)) for _ in range(draw.randint(1, 4)))
    chosen = draw.sample(list(events), draw.choice([0, 0, 1, 1, 2]))
    optimizer = draw.choice(["sgd", "momentum", "adam", "adamw", "rmsprop", "nadam"])
    return Plan(parts, draw.randint(3, 5), optimizer, draw.random() < 0.3, tuple(chosen))


class Net(nn.Module):
    def __init__(self, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(PARTS[name]() for name in parts)
        self.end = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.begin(x)
        for part in self.parts:
            y = y + part(y)
        result: torch.Tensor = self.end(torch.tanh(y))
        return result


def optimizer_of(name: str, model: nn.Module, place: int) -> torch.optim.Optimizer:
    rate, decay = 1e-2 / (1 + place), 0.01 * place
    weights = model.parameters()
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(
            weights, lr=rate, momentum=0.9 * (name == "momentum"), weight_decay=decay
        )
    kinds: dict[str, Any] = {
        "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop,
        "nadam": torch.optim.NAdam,
    }  # fmt: skip
    made: torch.optim.Optimizer = kinds[name](weights, lr=rate, weight_decay=decay)
    return made


class Trained(NamedTuple):
    losses: torch.Tensor  # [steps, models]
    states: list[dict[str, torch.Tensor]]
    counts: list[Any]  # what the models keep in Python


def counts_of(model: nn.Module) -> Any:
    return [getattr(module, "seen", None) for module in model.modules()]


def built(seed: int, plan: Plan, perturbed: float = 0.0) -> tuple[list[nn.Module], list[Any]]:
    models: list[nn.Module] = []
    for place in range(plan.models):
        torch.manual_seed(1000 * seed + place)
        models.append(Net(plan.parts))
    if perturbed:
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for model in models:
                for one in model.parameters():
                    noise = torch.randn(one.shape, generator=draw, dtype=torch.float64)
                    one.mul_(1 + perturbed * noise.to(one.dtype))
    for name in plan.events:
        for place, model in enumerate(models):
            events[name](0, place, model)
    own = [optimizer_of(plan.optimizer, model, place) for place, model in enumerate(models)]
    return models, own


def batches_of(seed: int, plan: Plan) -> list[list[torch.Tensor]]:
    torch.manual_seed(7 * seed + 1)
    count = 1 if plan.shared else plan.models
    return [[torch.randn(6, WIDTH) for _ in range(count)] for _ in range(STEPS)]


def happen(plan: Plan, step: int, models: list[nn.Module], first: int = 0) -> None:
    for name in plan.events:
        for place, model in enumerate(models, first):
            events[name](step, place, model)


def train_alone(seed: int, plan: Plan, perturbed: float = 0.0) -> Trained:
    models, optimizers = built(seed, plan, perturbed)
    losses = []
    for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        batches = batches_of(seed, plan)
        torch.manual_seed(500 + place)
        own = []
        for step, batch in enumerate(batches, 1):
            loss = model(batch[0 if plan.shared else place]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            own.append(loss.detach())
            happen(plan, step, [model], place)
        losses.append(torch.stack(own))
    return _result(torch.stack(losses, 1), models)


def train_fused(seed: int, plan: Plan) -> Trained:
    models, optimizers = built(seed, plan)
    batches = batches_of(seed, plan)
    array = fuse(models, optimizers, seeds=[500 + place for place in range(plan.models)])
    losses = []
    for step, batch in enumerate(batches, 1):
        given = batch[0] if plan.shared else batch
        loss = array(given).square().mean()
        array.zero_grad()
        array.backward(loss)
        array.step()
        losses.append(loss.front().detach().clone())
        happen(plan, step, models)
    array.follow()
    return _result(torch.stack(losses), models)


def _result(losses: torch.Tensor, models: list[nn.Module]) -> Trained:
    states = [copy.deepcopy(dict(model.state_dict())) for model in models]
    return Trained(losses, states, [counts_of(model) for model in models])


def tried(seed: int, plan: Plan | None = None) -> Outcome:
    plan = plan or random_plan(seed)
    try:
        alone = train_alone(seed, plan)
        if not bool(alone.losses.isfinite().all()):
            return Outcome("fails alone", "not finite", plan)
    except Exception as error:
        return Outcome("fails alone", f"{type(error).__name__}: {error}", plan)
    try:
        fused = train_fused(seed, plan)
    except StepscopeError as error:
        return Outcome("refused", str(error), plan)
    except Exception as error:
        return Outcome("raises", f"{type(error).__name__}: {error}", plan)
    words = difference(alone, fused, train_alone(seed, plan, PERTURBED))
    return Outcome("differs" if words else "same", words, plan)


def difference(alone: Trained, fused: Trained, near: Trained) -> str:
    """Allowed is a multiple of what rounding does to a second run alone."""
    if alone.counts != fused.counts:
        return f"Python: {fused.counts} instead of {alone.counts}"
    rows = [("loss", alone.losses, fused.losses, near.losses)]
    for place, (one, other, third) in enumerate(
        zip(alone.states, fused.states, near.states, strict=True)
    ):
        if one.keys() != other.keys():
            return f"model {place} has other tensors"
        rows += [(f"{name} of {place}", one[name], other[name], third[name]) for name in one]
    for name, one, other, third in rows:
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{name}: {other.dtype} {list(other.shape)}"
        moved = float((one - third).abs().max()) if one.numel() else 0.0
        apart = float((one - other).abs().max()) if one.numel() else 0.0
        if not apart <= 1e-10 + SLACK * moved:
            return f"{name}: {apart:.1e} apart, rounding moves it by {moved:.1e}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    kinds: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.nets):
        outcome = tried(seed)
        kinds[outcome.kind] += 1
        if outcome.kind == "refused":
            refusals[outcome.words] += 1
        elif outcome.kind in ("differs", "raises"):
            print(f"{seed}: {outcome.kind}: {outcome.words}\n    {outcome.plan}", flush=True)
    print(dict(kinds))
    for words, times in refusals.most_common():
        print(f"{times:5} refused: {words}")


if __name__ == "__main__":
    main()
