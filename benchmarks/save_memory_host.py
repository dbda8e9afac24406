"""What following a plan costs the host: trainings whose operators do next to nothing.

    python benchmarks/save_memory_host.py [--models resnet50,gpt2] [--rounds 9] [--profile]

The graphs are as large as those of the real trainings, the tensors are tiny. Five ways are compared
in turn: as it is, with hooks that only hand tensors on, with a plan that keeps everything, with the
plan that keeps the least, and with a tenth of that. Times are this thread's own, of whole steps. On
a GPU (`--cuda`) the plan is the one for 5% of the full batch, followed by a small batch.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.append(str(Path(__file__).parent.parent / "src"))

from save_memory_models import WORKLOADS, Changed, ChangedPlace, as_it_is
from stepscope.bench import catalogue
from stepscope.fix import save_memory
from stepscope.fix.saved.save_plan import KEEP, SavePlan

if TYPE_CHECKING:
    from collections.abc import Callable

# As deep as the real ones, and as narrow as they can be.
TINY_GRAPHS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 2, "image": 32, "classes": 4, "directions": 2, "width": 2},
    "densenet121": {"batch": 2, "image": 32, "classes": 4, "directions": 2, "growth": 2},
    "gpt2": {"batch": 1, "length": 8, "words": 16, "known": 16, "width": 16, "heads": 2},
    "bert-large": {"batch": 1, "length": 16, "words": 3000, "masked": 2, "width": 16, "heads": 2},
}
SMALL_BATCH = 4


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    for name in options.models.split(","):
        measure(name, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(TINY_GRAPHS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--cuda", action="store_true", help="the real models on a GPU")
    return parser.parse_args()


def measure(name: str, options: argparse.Namespace) -> None:
    device = torch.device("cuda" if options.cuda else "cpu")
    settings = {**WORKLOADS[name], "batch": SMALL_BATCH} if options.cuda else TINY_GRAPHS[name]
    plan = _plan_of(name, device, WORKLOADS[name] if options.cuda else settings, options.cuda)
    ways: dict[str, Callable[[Any], Any]] = {
        "plain": as_it_is,
        "hooks": _HandingOn,
        "keep all": lambda model: save_memory(model, plan=_keeping_all(plan)),
        "a tenth": lambda model: save_memory(model, plan=_a_tenth(plan)),
        "plan": lambda model: save_memory(model, plan=plan),
    }
    steps = {way: _step(name, change, device, settings) for way, change in ways.items()}
    for step in steps.values():
        for number in range(6):
            step(number)
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(options.rounds):
        for way, step in steps.items():
            times[way].append(_host_ms(step, device))
    uses = len(plan.uses)
    counts = {a: sum(u.action == a for u in plan.uses) for a in ("keep", "recompute", "encode")}
    print(f"{name}: {uses} saved tensors, {counts}, {len(plan.repeated)} repeats")
    plain = _quiet(times["plain"])
    for way, taken in times.items():
        ms = _quiet(taken)
        each = (ms - plain) / uses * 1e3
        print(f"  {way:9} {ms:8.2f} ms  {ms - plain:+7.2f} ms  {each:6.2f} us each saved tensor")
    if options.profile:
        _print_profile(steps["plan"], device)


def _quiet(times: list[float]) -> float:
    """The lower quartile: others may use the machine, too."""
    return statistics.quantiles(times, n=4)[0]


def _plan_of(name: str, device: Any, settings: dict[str, Any], timed: bool) -> SavePlan:
    target = {"max_slowdown": 0.05} if timed else {}
    changed = Changed(lambda model: save_memory(model, warmup=4 if timed else 1, **target))
    step = _step(name, changed.change, device, settings, changed)
    for number in range(8):
        step(number)
    assert changed.saver is not None
    assert changed.saver.plan is not None
    for note in changed.saver.notes:
        print(f"{name}: {note}")
    plan = changed.saver.plan
    del step, changed
    gc.collect()
    return plan.for_other_shapes() if timed else plan


def _step(
    name: str,
    change: Any,
    device: Any,
    settings: dict[str, Any],
    changed: Changed | None = None,
) -> Callable[[int], Any]:
    torch.manual_seed(0)
    workload = catalogue.load(name)
    config = workload.config("small", {**settings, "batches": 1})
    place = ChangedPlace(device, changed=changed or Changed(change))
    return workload.build(config, place)


def _keeping_all(plan: SavePlan) -> SavePlan:
    """All but one: a plan that changes nothing is not followed."""
    uses = [replace(use, action=KEEP, encoding=None) for use in plan.uses]
    place = next((n for n, use in enumerate(plan.uses) if use.encoding in ("sign", "shape")), None)
    if place is not None:
        uses[place] = plan.uses[place]
        return replace(plan, uses=tuple(uses), repeated=(), results=())
    place = next(n for n, use in enumerate(plan.uses) if use.action != KEEP)
    uses[place] = plan.uses[place]
    return replace(plan, uses=tuple(uses))


def _a_tenth(plan: SavePlan) -> SavePlan:
    """Every tenth of what is not kept, as in plans for a few percent of a step."""
    replaced = [number for number, use in enumerate(plan.uses) if use.action != KEEP]
    chosen = set(replaced[::10])
    uses = tuple(
        use if number in chosen else replace(use, action=KEEP, encoding=None)
        for number, use in enumerate(plan.uses)
    )
    return replace(plan, uses=uses)


class _HandingOn:
    """Hooks that do nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._hooks: Any = nullcontext()
        model.register_forward_pre_hook(self._enters)
        model.register_forward_hook(self._leaves)

    def _enters(self, _model: Any, _args: Any) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
        self._hooks.__enter__()

    def _leaves(self, _model: Any, _args: Any, _output: Any) -> None:
        self._hooks.__exit__(None, None, None)


def _host_ms(step: Callable[[int], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter_ns() if device.type == "cuda" else time.thread_time_ns()
    step(0)
    ended = time.perf_counter_ns() if device.type == "cuda" else time.thread_time_ns()
    return (ended - began) / 1e6


def _print_profile(step: Callable[[int], Any], device: torch.device) -> None:
    """Backward of a GPU training runs in a thread of its own: with one thread it is seen, too."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for _ in range(5):
            step(0)
        profiler.disable()
    if device.type == "cuda":
        torch.cuda.synchronize()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(32)


if __name__ == "__main__":
    main()
