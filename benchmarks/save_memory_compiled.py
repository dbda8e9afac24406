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
from pathlib import Path
from typing import Any

WARM_UP, TIMED, CHECKED = 3, 20, 5


@contextlib.contextmanager
def alone(lock: str) -> Any:
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _settle(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def row(
    name: str, way: str, lock: str, *, bf16: bool, tiny: bool, deterministic: bool, barrier: int
) -> dict[str, Any]:
    import save_memory_models as models
    import torch

    from stepscope.fix.saved.compiled import operator_costs
    from stepscope.fix.saved.compiled.compiled_saver import CompiledSaver
    from stepscope.records.change_values import MemoryTarget

    measure = operator_costs._measure

    def measure_alone(*given: Any) -> Any:
        with alone(lock):
            return measure(*given)

    operator_costs._measure = measure_alone
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    savers: list[CompiledSaver] = []
    held: list[torch.nn.Module] = []

    def change(model: torch.nn.Module) -> torch.nn.Module:
        held.append(model)
        model.compile()
        if way.startswith("torch:"):
            import torch._functorch.config as config

            config.activation_memory_budget = float(way.removeprefix("torch:"))
        elif not way.startswith("plain"):
            rounding = way.startswith("r")
            share = None if "least" in way else float(way.removeprefix("r"))
            savers.append(CompiledSaver(model, MemoryTarget(max_slowdown=share), exact=not rounding))
        return model

    step = models.build(name, models.Changed(change), device, tiny=tiny)
    on = torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
    losses = []

    def run(number: int) -> None:
        torch.manual_seed(number)
        with on:
            losses.append(step(number))

    begin = time.perf_counter()
    run(0)  # compiles
    with alone(lock):
        for number in range(1, CHECKED):
            run(number)
        _settle(device)
    digest = hashlib.sha256()
    for parameter in (p for model in held for p in model.parameters()):
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    compiled_s = time.perf_counter() - begin
    checked = [float(loss) for loss in losses]
    result = {"name": name, "way": way, "bf16": bf16, "losses": checked}
    result["weights"] = digest.hexdigest()[:12]
    result["compile_s"] = round(compiled_s, 1)
    Path(f"{lock}.{os.getpid()}").touch()
    while barrier and len(list(Path(lock).parent.glob(f"{Path(lock).name}.*"))) < barrier:
        time.sleep(0.2)
    with alone(lock):
        for number in range(WARM_UP):
            run(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
            losses.clear()
            torch.cuda.reset_peak_memory_stats()
            static = torch.cuda.memory_allocated()
            times = []
            for number in range(TIMED):
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                run(number)
                events[1].record()
                torch.cuda.synchronize()
                times.append(events[0].elapsed_time(events[1]))
            result["step_ms"] = round(statistics.median(times), 3)
            result["static_mb"] = static / 1e6
            result["above_mb"] = (torch.cuda.max_memory_allocated() - static) / 1e6
    for saver in savers:
        result["notes"] = saver.notes
        result["plans"] = [
            {
                "saved_mb": [plan.saved_bytes_before / 1e6, plan.saved_bytes / 1e6],
                "peak_mb": [plan.peak_bytes_before / 1e6, plan.peak_bytes / 1e6],
                "grads_mb": plan.gradient_bytes / 1e6,
                "ms": [plan.step_ns / 1e6, plan.extra_ns / 1e6],
                "repeated": plan.repeated,
                "planning_s": plan.planning_ns / 1e9,
                "ladder": [(p.share, p.peak_bytes / 1e6, p.time_ns / 1e6) for p in plan.ladder],
            }
            for plan in saver.plans
        ]
    return result


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
        print(
            json.dumps(
                row(
                    *options.row,
                    options.lock,
                    bf16=not options.fp32,
                    tiny=options.tiny,
                    deterministic=options.deterministic,
                    barrier=options.barrier,
                )
            )
        )
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
                line = text.strip().splitlines()[-1:] or [json.dumps({"name": name, "way": way, "error": errors[-1500:]})]
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
