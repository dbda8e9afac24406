"""Record models of workloads/zoo.py as ../shared/traces/h200 was recorded: traces, and the truth.

    python benchmarks/record_models.py --out DIR MODEL:CONFIG[,CONFIG...] ...

A config is words joined by "-": fp32, tf32 or bf16; foreach, fused or loop; graph; x2 (twice the
batch). Words left out are fp32, foreach. `+` behind it also records a trace of three steps. Writes
DIR/truth.json and DIR/<model>_<config>.json.gz. Works with torch and the standard library alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from workloads.zoo import BATCHES, Workload, build, parameters

if TYPE_CHECKING:
    from collections.abc import Callable

WARMUP, STEPS = 8, 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("wanted", nargs="+")
    options = parser.parse_args()
    truth: dict[str, Any] = {}
    for wanted in options.wanted:
        model, _, configs = wanted.partition(":")
        for config in configs.split(","):
            name = f"{model}_{config.rstrip('+')}"
            trace = options.out / f"{name}.json.gz" if config.endswith("+") else None
            truth[name] = _record(model, set(config.rstrip("+").split("-")), trace)
            print(name, json.dumps(truth[name]), flush=True)
            (options.out / "truth.json").write_text(json.dumps(truth, indent=1))
            gc.collect()
            torch.cuda.empty_cache()


def _record(model: str, words: set[str], trace: Path | None) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = BATCHES[model] * (2 if "x2" in words else 1)
    tf32 = "tf32" in words
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    workload = build(model, device, batch)
    step = _step(workload, device, words)
    if "graph" in words:
        step = _graphed(step)
    for _ in range(WARMUP):
        step()
    synced, pipelined = _timed(step, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
    if trace is not None:
        _profile(step, trace)
    return {
        "step_ms_synced": synced,
        "step_ms_pipelined": pipelined,
        "peak_alloc": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "params": sum(p.numel() for group in parameters(workload.modules) for p in group),
        "batch": batch,
        "amp": "bf16" in words,
        "tf32": tf32,
        "opt": next((word for word in ("fused", "loop") if word in words), "foreach"),
        "graph": "graph" in words,
    }


def _step(workload: Workload, device: str, words: set[str]) -> Callable[[], None]:
    kind: dict[str, Any] = {"capturable": True} if "graph" in words else {}
    if "fused" in words:
        kind["fused"] = True
    elif "loop" in words:
        kind["foreach"] = False
    optimizers = [torch.optim.AdamW(group, **kind) for group in parameters(workload.modules)]
    bf16 = "bf16" in words

    def step() -> None:
        for loss, optimizer in zip(workload.passes, optimizers, strict=True):
            optimizer.zero_grad()
            context: Any = contextlib.nullcontext()
            if bf16:
                context = torch.autocast(device, torch.bfloat16, cache_enabled="graph" not in words)
            with context:
                value = loss()
            value.backward()
            optimizer.step()

    return step


def _graphed(step: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _timed(step: Callable[[], None], device: str) -> tuple[float, float]:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    each = []
    for _ in range(STEPS):
        wait()
        began = time.perf_counter()
        step()
        wait()
        each.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait()
    return statistics.median(each) * 1e3, (time.perf_counter() - began) / STEPS * 1e3


def _profile(step: Callable[[], None], file: Path) -> None:
    plan = torch.profiler.schedule(wait=0, warmup=2, active=3)
    with torch.profiler.profile(
        schedule=plan,
        record_shapes=True,
        on_trace_ready=lambda found: found.export_chrome_trace(str(file)),
    ) as profiler:
        for _ in range(5):
            step()
            profiler.step()


if __name__ == "__main__":
    main()
