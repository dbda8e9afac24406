"""Is each fused training the training of its models alone, on this device?

Losses of ten steps, fused and alone, from the same weights, data and random numbers. They may
differ by as much as trainings do whose weights were changed by one rounding (the controls). There
are several: one rounding in ten flips an activation and sends a small net elsewhere.
"""

from __future__ import annotations

import copy
import time
import traceback
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fuse_ways import AloneNet, Setup, fused_nets
from stepscope.fix.fuse import CapturedStep, Stacked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STEPS = 10
_ROUNDING = {"fp32": 2.0**-23, "bf16": 2.0**-9}
_FLOOR = {"fp32": 2e-4, "bf16": 2e-2}  # of the loss: what ten steps make of other kernels
_CONTROLS = 5
_TIMES_CONTROL = 5.0


@dataclass(frozen=True)
class CheckResult:
    """One training fused against alone; the differences are shares of the loss."""

    name: str
    passed: bool
    words: str


def check(setup: Setup, models: int, compiled: bool = False) -> list[CheckResult]:
    """Fused as it is, as a graph, and if wanted compiled."""
    name = f"{setup.case.name} {setup.dtype}"
    plain = _Serial(setup, models)
    results = [_against(name, plain, lambda: _train_fused(setup, models))]
    # Graphs and compiled code draw for all models together, which gives other random numbers.
    quiet = replace(setup, drops=False)
    serial = _Serial(quiet, models) if setup.case.draws else plain
    ways = [("graphed", True, False)] + ([("compiled", True, True)] if compiled else [])
    for words, graphed, by_compiler in ways:
        train = partial(_train_fused, quiet, models, "together", graphed, by_compiler)
        results.append(_against(f"{name} {words}", serial, train))
    return results


class _Serial:
    """Losses of the models trained alone, and how far others may be from them."""

    def __init__(self, setup: Setup, models: int) -> None:
        alone = [_train_alone(setup, model) for model in range(models)]
        controls = [
            [_train_alone(setup, model, _ROUNDING[setup.dtype], seed) for model in range(models)]
            for seed in range(_CONTROLS)
        ]
        self.losses = torch.tensor(alone)
        self.limit = _limit(self.losses, torch.tensor(controls), setup.dtype)


def _limit(losses: torch.Tensor, others: torch.Tensor, dtype: str) -> torch.Tensor:
    noise = (losses - others).abs().cummax(2).values  # it grows, by chance not in every step
    return _TIMES_CONTROL * noise.amax((0, 1)) + _FLOOR[dtype] * losses.abs().amax(0)


def _against(name: str, serial: _Serial, train: Callable[[], Any]) -> CheckResult:
    start = time.perf_counter()
    try:
        losses, report = train()
    except Exception:
        last = traceback.format_exc().strip().splitlines()
        return CheckResult(name, False, " | ".join(line.strip() for line in last[-7:]))
    seconds = time.perf_counter() - start
    wanted, limit = serial.losses, serial.limit
    distance = (losses - wanted).abs().amax(0)
    passed = bool((distance <= limit).all()) and bool(losses.isfinite().all())
    worst = int((distance / limit.clamp(min=1e-30)).argmax())
    words = (
        f"step {worst + 1}: {float(distance[worst]):.2e} off, {float(limit[worst]):.2e} allowed, "
        f"loss {float(wanted[0, 0]):.3f} -> {float(losses[0, -1]):.3f}, {seconds:.1f} s; {report}"
    )
    return CheckResult(name, passed, words)


def _train_alone(setup: Setup, model: int, change: float = 0.0, seed: int = 0) -> list[float]:
    nets: Sequence[nn.Module] = setup.nets(model)
    if change:
        nets = copy.deepcopy(nets)
        draw = torch.Generator(setup.device).manual_seed(seed)
        with torch.no_grad():
            for net in nets:
                for one in net.parameters():
                    noise = torch.randn(one.shape, generator=draw, device=setup.device)
                    one.mul_(1 + change * noise)
    trained = [AloneNet(net, setup.optimizer(net, model), setup) for net in nets]
    batch = setup.batch(model)
    torch.manual_seed(model)
    return [float(setup.case.step(trained, batch).detach()) for _ in range(STEPS)]


def _train_fused(
    setup: Setup,
    models: int,
    draws: str = "own",
    graphed: bool = False,
    compiled: bool = False,
) -> tuple[torch.Tensor, str]:
    """Losses [models, steps], and what was not fused."""
    nets, batch = fused_nets(setup, models, compiled, draws)
    train: Any = lambda: setup.case.step(nets, batch)  # noqa: E731
    if graphed:
        train = CapturedStep(train, [net.array for net in nets])
    losses = []
    for _ in range(STEPS):
        loss = train()
        assert isinstance(loss, Stacked)
        losses.append(loss.front().detach().clone())
    return torch.stack(losses, 1).cpu(), _not_fused([net.array.report() for net in nets])


def _not_fused(reports: list[dict[str, Any]]) -> str:
    parts = []
    for report in reports:
        parts += [
            f"{way}: {', '.join(report['functions'][way])}"
            for way in ("vmap", "one by one")
            if way in report["functions"]
        ]
        parts += [f"{path}: {why}" for path, why in report["one_by_one"].items()]
    return "; ".join(parts) or "all fused"
