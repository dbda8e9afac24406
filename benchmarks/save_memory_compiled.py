"""Compiled trainings: peak, step and exactness with save_memory, against torch's own budgets.

    python benchmarks/save_memory_compiled.py --names resnet50 gpt2 --ways plain 0.05 0.15 torch:0.5

Each row is a process of its own. Processes compile beside each other; what is timed runs alone.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import save_memory_models as models
from stepscope.fix import save_memory
from stepscope.fix.saved.compiled import operator_costs

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP, TIMED, CHECKED = 3, 20, 5


@contextlib.contextmanager
def alone(lock: str) -> Any:
    with Path(lock).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


@dataclass(slots=True)
class Way:
    """A way to train: `plain`, `torch:BUDGET`, a share of time, `rSHARE` with rounding."""

    name: str
    savers: list[Any] = field(default_factory=list)
    models: list[torch.nn.Module] = field(default_factory=list)

    def change(self, model: torch.nn.Module) -> torch.nn.Module:
        self.models.append(model)
        model.compile()
        if self.name.startswith("torch:"):
            import torch._functorch.config as config

            config.activation_memory_budget = float(self.name.removeprefix("torch:"))
        elif not self.name.startswith("plain"):
            share = None if "least" in self.name else float(self.name.removeprefix("r"))
            rounding = self.name.startswith("r")
            self.savers.append(save_memory(model, max_slowdown=share, rounding=rounding))
        return model

    def weights(self) -> str:
        digest = hashlib.sha256()
        for weight in (weight for model in self.models for weight in model.parameters()):
            digest.update(weight.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()[:12]

    def plans(self) -> list[dict[str, Any]]:
        return [
            {
                "saved_mb": [plan.saved_bytes_before / 1e6, plan.saved_bytes / 1e6],
                "peak_mb": [plan.peak_bytes_before / 1e6, plan.peak_bytes / 1e6],
                "grads_mb": plan.gradient_bytes / 1e6,
                "ms": [plan.step_ns / 1e6, plan.extra_ns / 1e6],
                "repeated": plan.repeated,
                "planning_s": plan.planning_ns / 1e9,
                "ladder": [
                    (point.share, point.peak_bytes / 1e6, point.step_ns / 1e6)
                    for point in plan.ladder
                ],
            }
            for saver in self.savers
            for plan in saver.graphs
        ]


def row(name: str, options: Any) -> dict[str, Any]:
    measure = operator_costs._measure

    def measure_alone(*given: Any) -> Any:
        with alone(options.lock):
            return measure(*given)

    operator_costs._measure = measure_alone
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(options.deterministic, warn_only=True)
    torch.backends.cudnn.deterministic = options.deterministic
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    way = Way(options.row[1])
    step = models.build(name, models.Changed(way.change), device, tiny=options.tiny)
    precision = torch.autocast(device.type, torch.bfloat16, enabled=not options.fp32)

    def run(number: int) -> float:
        torch.manual_seed(number)
        with precision:
            return float(step(number))

    begin = time.perf_counter()
    losses = [run(0)]  # compiles
    with alone(options.lock):
        losses += [run(number) for number in range(1, CHECKED)]
    result = {"name": name, "way": way.name, "losses": losses, "weights": way.weights()}
    result["compile_s"] = round(time.perf_counter() - begin, 1)
    Path(f"{options.lock}.{os.getpid()}").touch()
    waiting = Path(options.lock)
    while len(list(waiting.parent.glob(f"{waiting.name}.*"))) < options.barrier:
        time.sleep(0.2)
    with alone(options.lock):
        result |= timed(run, device)
    return {**result, "plans": way.plans(), "notes": [n for s in way.savers for n in s.notes]}


def timed(run: Callable[[int], float], device: torch.device) -> dict[str, Any]:
    """Return the median step and the peak above what is there between steps, on a GPU."""
    for number in range(WARM_UP):
        run(number)
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    static = torch.cuda.memory_allocated()
    times = []
    for number in range(TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(number)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return {
        "step_ms": round(statistics.median(times), 3),
        "static_mb": static / 1e6,
        "above_mb": (torch.cuda.max_memory_allocated() - static) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", nargs="+", default=["resnet50"])
    parser.add_argument("--ways", nargs="+", default=["plain", "0.05", "0.15", "torch:0.5"])
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--barrier", type=int, default=0, help="processes to wait for")
    parser.add_argument("--out", type=Path, default=Path("save_memory_compiled.jsonl"))
    parser.add_argument("--row", nargs=2)
    parser.add_argument("--lock", default="/tmp/save_memory_compiled.lock")
    options = parser.parse_args()
    if options.row:
        print(json.dumps(row(options.row[0], options)))
        return
    waiting = [(name, way) for name in options.names for way in options.ways]
    running: dict[Any, Any] = {}
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    with options.out.open("a") as out:
        while waiting or running:
            while waiting and len(running) < options.at_once:
                name, way = waiting.pop(0)
                command = [sys.executable, __file__, "--row", name, way, "--lock", options.lock]
                command += ["--fp32"] * options.fp32 + ["--tiny"] * options.tiny
                command += ["--deterministic"] * options.deterministic
                command += ["--barrier", str(options.barrier)]
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    env=environment,
                )  # fmt: skip
                running[process] = (name, way)
            time.sleep(0.5)
            for process in [one for one in running if one.poll() is not None]:
                name, way = running.pop(process)
                text, errors = process.communicate()
                line = text.strip().splitlines()[-1:] or [
                    json.dumps({"name": name, "way": way, "error": errors[-1500:]})
                ]
                out.write(line[0] + "\n")
                out.flush()
                show(json.loads(line[0]))


def show(result: dict[str, Any]) -> None:
    if "error" in result:
        print(result["name"], result["way"], "failed:", result["error"][-400:], flush=True)
        return
    print(
        f"{result['name']:14s} {result['way']:9s} {result.get('step_ms')} ms, "
        f"above static {result.get('above_mb', 0):.0f} MB, losses {result['losses'][-1]:.8f}, "
        f"weights {result['weights']}, compile {result['compile_s']} s",
        flush=True,
    )
    for plan in result.get("plans", ()):
        print("   ", {key: value for key, value in plan.items() if key != "ladder"}, flush=True)
    for note in result.get("notes", ()):
        print("   ", note, flush=True)


if __name__ == "__main__":
    main()
