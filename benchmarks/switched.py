"""What capture costs a step, by switching it off and on inside one training process.

    python benchmarks/switched.py [--blocks 120] [--length 20] [--clock cpu] -- SCRIPT [OPTIONS...]

Two runs of one script differ by a percent or more even without stepscope: memory layout, core,
temperature. So SCRIPT runs once, with capture attached, and blocks of its steps run in pairs, one
with capture switched off (hooks, device events, sampler) and one with it on, in a new random order
for every pair. The first steps of a block are left out, because work queued before the switch still
runs then.

    before   blocks before the window
    behind   blocks after it
    left     bare blocks after the window against bare blocks before it: the window's lasting
             effect, mixed with whatever else drifted in that time

Each is the ratio of block means (without the fastest and slowest twentieth of the pairs) with a 95%
interval from 2000 resamplings of the pairs. Under torchrun every rank switches at the same step and
rank 0 prints. On a busy machine wall times say little; `--clock cpu` compares the processor time of
all threads of the process, the writer's included. Needs torch and the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import math
import os
import random
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch
import torch.utils.data.dataloader
from torch.optim import optimizer as torch_optimizer

from stepscope.measure.hooks import install
from stepscope.measure.session.session import Session
from stepscope.measure.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIRST = 20  # steps that warm up
WARMUP, ACTIVE = 2, 3
AFTER = 30  # steps after the window: memory is measured, the trace is compressed
TRIM = 0.05
RESAMPLINGS = 2000
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    options = _options()
    plan = _Plan(options.blocks, options.length)
    with tempfile.TemporaryDirectory() as scratch:
        switch = _Switch(Settings(folder=scratch, wait=plan.opens, warmup=WARMUP, active=ACTIVE))
        ends = _train(options.command, plan, switch, CLOCKS[options.clock])
        switch.session.close()
    if int(os.environ.get("RANK", "0")) == 0:
        result = _compare(ends, plan, options.settle)
        print(json.dumps(result, indent=1))
        if options.json:
            options.json.write_text(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=120, help="pairs of blocks on each side")
    parser.add_argument("--length", type=int, default=20, help="steps of a block")
    parser.add_argument("--settle", type=int, default=5, help="steps of a block left out")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


class _Plan:
    """Which steps of the script are bare. Capture counts only the steps it sees."""

    def __init__(self, blocks: int, length: int) -> None:
        draw = random.Random(0)
        self.length = length
        self.pairs: dict[str, list[tuple[int, int]]] = {"before": [], "behind": []}  # bare, ours
        place = FIRST
        for side in self.pairs:
            for _ in range(blocks):
                first, second = place, place + length
                bare_first = draw.random() < 0.5
                self.pairs[side].append((first, second) if bare_first else (second, first))
                place += 2 * length
            if side == "before":
                self.opens = FIRST + blocks * length  # as capture counts
                place += WARMUP + ACTIVE + AFTER
        self.steps = place
        self.bare = {
            bare + step
            for pairs in self.pairs.values()
            for bare, _ in pairs
            for step in range(length)
        }


# What capture replaces names in.
_OWNERS: tuple[Any, ...] = (
    torch.autograd,
    torch.autograd.graph,
    torch.nn.Module,
    torch.utils.data.dataloader.DataLoader,
    torch.utils.data.dataloader._BaseDataLoaderIter,
)


class _Switch:
    """Removes every part of capture from the training process, and puts it back."""

    def __init__(self, settings: Settings) -> None:
        before = [dict(vars(owner)) for owner in _OWNERS]
        hooks: tuple[dict[int, Any], ...] = (
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
        known = [dict(registered) for registered in hooks]
        collections = list(gc.callbacks)
        self.session = Session(settings)
        install(self.session)
        self._names = [
            (owner, name, bare[name], ours)
            for owner, bare in zip(_OWNERS, before, strict=True)
            for name, ours in vars(owner).items()
            if name in bare and bare[name] is not ours
        ]
        self._hooks = [
            (registered, {key: hook for key, hook in registered.items() if key not in earlier})
            for registered, earlier in zip(hooks, known, strict=True)
        ]
        self._collections = [callback for callback in gc.callbacks if callback not in collections]
        self._on = True

    def turn(self, *, on: bool) -> None:
        if on == self._on:
            return
        self._on = on
        for owner, name, bare, ours in self._names:
            setattr(owner, name, ours if on else bare)
        for registered, hooks in self._hooks:
            for key, hook in hooks.items():
                if on:
                    registered[key] = hook
                else:
                    registered.pop(key, None)
        for callback in self._collections:
            (gc.callbacks.append if on else gc.callbacks.remove)(callback)
        self._turn_parts(on=on)

    def _turn_parts(self, *, on: bool) -> None:
        parts = self.session._parts
        if parts is None:
            return
        (parts.sampler_resumes if on else parts.sampler_pauses)()
        if on and parts.device is not None:
            parts.device.restart()


def _train(
    command: Sequence[str], plan: _Plan, switch: _Switch, clock: Callable[[], float]
) -> list[float]:
    """Run the script; returns when each of its steps ended."""
    ends: list[float] = []

    def ended(*_: Any) -> None:
        ends.append(clock())
        switching.append(len(ends) not in plan.bare)

    switching: list[bool] = []
    step: Callable[..., Any] = torch_optimizer.Optimizer.zero_grad

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Every step of the workloads calls this once: outside the optimizer's step, where hooks run
        if switching:
            switch.turn(on=switching.pop())
            switching.clear()
        return step(self, *args, **kwargs)

    torch_optimizer.register_optimizer_step_post_hook(ended)
    torch_optimizer.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    sys.argv = [*command, "--steps", str(plan.steps)]
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(command[0], run_name="__main__")
    return ends


def _compare(ends: list[float], plan: _Plan, settle: int) -> dict[str, Any]:
    def mean(first: int) -> float:
        return (ends[first + plan.length - 1] - ends[first + settle - 1]) / (plan.length - settle)

    comparison: dict[str, Any] = {}
    bare: dict[str, list[float]] = {}
    for side, pairs in plan.pairs.items():
        bare[side] = [math.log(mean(first)) for first, _ in pairs]
        ours = [math.log(mean(second)) for _, second in pairs]
        differences = [b - a for a, b in zip(bare[side], ours, strict=True)]
        comparison[side] = _interval(differences)
        comparison[f"{side}_bare_ms"] = math.exp(_middle(bare[side])) * 1e3
    both = list(zip(bare["before"], bare["behind"], strict=True))
    comparison["left"] = _interval([b - a for a, b in both])
    comparison |= {"steps": len(ends), "load": os.getloadavg()}
    return comparison


def _interval(logs: list[float]) -> dict[str, float]:
    draw = random.Random(0)
    means = sorted(_middle(draw.choices(logs, k=len(logs))) for _ in range(RESAMPLINGS))
    low, high = means[int(0.025 * RESAMPLINGS)], means[int(0.975 * RESAMPLINGS)]
    return {
        "ratio": math.exp(_middle(logs)),
        "low": math.exp(low),
        "high": math.exp(high),
    }


def _middle(values: Sequence[float]) -> float:
    cut = int(len(values) * TRIM)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


if __name__ == "__main__":
    main()
