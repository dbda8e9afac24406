"""Record models of workloads/zoo as ../shared/traces/h200 was recorded: traces and measured steps.

    python benchmarks/record_models.py --out DIR MODEL:CONFIG[,CONFIG...] ...

A config is words joined by "-": fp32, tf32 or bf16; foreach, fused or loop; sgd (with momentum);
graph; ckpt (every block computed twice); x2 (twice the batch). Words left out are fp32, foreach,
AdamW. A `+` after it also records a trace of three steps. All configurations of a model live in one
process and take turns, block by block, so that differences between processes are not mistaken for
differences between configurations. Writes DIR/truth.json and DIR/<model>_<config>.json.gz. Needs
torch and the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from workloads.zoo import MODELS, build
from workloads.zoo.workload import parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from workloads.zoo.workload import Workload

WARMUP, ROUNDS, BLOCK, SYNCED = 6, 6, 8, 4
PHASES = ("forward", "backward", "optimizer")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("wanted", nargs="+")
    options = parser.parse_args()
    truth: dict[str, Any] = {}
    for wanted in options.wanted:
        model, _, configs = wanted.partition(":")
        began = time.perf_counter()
        truth |= _record(model, configs.split(","), options.out)
        (options.out / "truth.json").write_text(json.dumps(truth, indent=1))
        print(f"{model}: {time.perf_counter() - began:.0f} s", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _record(model: str, configs: list[str], out: Path) -> dict[str, Any]:
    configurations = []
    for config in configs:
        try:
            configurations.append(Configuration(model, config.rstrip("+")))
        except (RuntimeError, AttributeError) as problem:
            print(f"{model} {config}: left out: {problem}", flush=True)
    for _ in range(ROUNDS):
        for configuration in configurations:
            configuration.measure()
    # Traces come last: the profiler slows the driver for good.
    for configuration in configurations:
        if f"{configuration.words}+" in configs:
            configuration.profile(out / f"{model}_{configuration.words}.json.gz")
    return {
        f"{model}_{configuration.words}": configuration.measured()
        for configuration in configurations
    }


@dataclass
class Timed:
    """Seconds, over all rounds."""

    synced: list[float] = field(default_factory=list)
    back_to_back: list[float] = field(default_factory=list)  # means of blocks
    phases: list[tuple[float, ...]] = field(default_factory=list)  # the host's


class Configuration:
    """A model in one configuration, ready to step."""

    def __init__(self, model: str, words: str) -> None:
        self.words, self.timed = words, Timed()
        chosen = set(words.split("-"))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.batch = MODELS[model].batch * (2 if "x2" in chosen else 1)
        self.tf32, self.bf16, self.graph = (w in chosen for w in ("tf32", "bf16", "graph"))
        self.kind = next((w for w in ("fused", "loop") if w in chosen), "foreach")
        self.sgd = "sgd" in chosen
        before = self._allocated()
        self._set()
        workload = build(model, self.device, self.batch)
        if "ckpt" in chosen:
            _checkpoint_blocks(workload.modules[0])
        self.params = sum(p.numel() for group in parameters(workload.modules) for p in group)
        self.step = self._made(workload)
        if self.graph:
            self.step = _graphed(self.step)
        for _ in range(WARMUP):
            self.step()
        self.peak = None
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() - before

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def _set(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.tf32

    def _made(self, workload: Workload) -> Callable[[], tuple[float, ...] | None]:
        kind: dict[str, Any] = {"capturable": True} if self.graph else {}
        if self.kind == "fused":
            kind["fused"] = True
        elif self.kind == "loop":
            kind["foreach"] = False
        make: Any = torch.optim.AdamW
        if self.sgd:
            make, kind = torch.optim.SGD, kind | {"momentum": 0.9, "weight_decay": 5e-4}
        optimizers = [make(group, **kind) for group in parameters(workload.modules)]

        def step() -> tuple[float, ...]:
            spent = [0.0, 0.0, 0.0]
            for loss, optimizer in zip(workload.passes, optimizers, strict=True):
                times = [time.perf_counter()]
                optimizer.zero_grad()
                context: Any = contextlib.nullcontext()
                if self.bf16:
                    context = torch.autocast(
                        self.device, torch.bfloat16, cache_enabled=not self.graph
                    )
                with context:
                    value = loss()
                times.append(time.perf_counter())
                value.backward()
                times.append(time.perf_counter())
                optimizer.step()
                times.append(time.perf_counter())
                spent = [s + b - a for s, a, b in zip(spent, times, times[1:], strict=False)]
            return tuple(spent)

        return step

    def measure(self) -> None:
        """One round."""
        wait = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        self._set()
        for _ in range(2):
            self.step()
        for _ in range(SYNCED):
            wait()
            began = time.perf_counter()
            phases = self.step()
            wait()
            self.timed.synced.append(time.perf_counter() - began)
            if not self.graph and phases:
                self.timed.phases.append(phases)
        began = time.perf_counter()
        for _ in range(BLOCK):
            self.step()
        wait()
        self.timed.back_to_back.append((time.perf_counter() - began) / BLOCK)

    def profile(self, file: Path) -> None:
        self._set()
        plan = torch.profiler.schedule(wait=0, warmup=2, active=3)
        with torch.profiler.profile(
            schedule=plan,
            record_shapes=True,
            on_trace_ready=lambda found: found.export_chrome_trace(str(file)),
        ) as profiler:
            for _ in range(5):
                self.step()
                profiler.step()

    def measured(self) -> dict[str, Any]:
        timed = self.timed
        phases = [statistics.median(each) * 1e3 for each in zip(*timed.phases, strict=True)]
        return {
            "step_ms_synced": statistics.median(timed.synced) * 1e3,
            "step_ms_pipelined": statistics.median(timed.back_to_back) * 1e3,
            "blocks_ms": [round(each * 1e3, 4) for each in timed.back_to_back],
            "host_ms": dict(zip(PHASES, phases, strict=False)) or None,
            "peak_alloc": self.peak,
            "params": self.params,
            "batch": self.batch,
            "amp": self.bf16,
            "tf32": self.tf32,
            "opt": self.kind,
            "graph": self.graph,
        }


class _Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, *given, use_reentrant=False)
        return found


def _checkpoint_blocks(model: Any) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = _Twice(block)


def _graphed(step: Callable[[], Any]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replayed(_held: object = step) -> None:  # its tensors must outlive the capture
        graph.replay()

    return replayed


if __name__ == "__main__":
    main()
