"""One model alone and under DDP, in turns, with the calibration that predicts one from the other.

One process starts the ranks by forking, so that torch is imported once. Each round has, in a new
random order: steps of rank 0 alone, steps under DDP with each bucket size, and a sweep of
all-reduces. A machine that slows down thus slows all of them. At the end rank 0 records its own
steps with the profiler. With --strong the ranks share the batch of rank 0 alone. With --sleep,
compute sleeps that many seconds per layer (twice that in backward), so that it needs no cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from stepscope.measure.calibrate.collectives import (
    Buffers,
    ContentionTimer,
    KindSweeper,
    elements,
    make_groups,
)

WARM = 4


class Nap(torch.autograd.Function):
    """Takes time but no processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Layer(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.linear(x))
        return Nap.apply(x, self.seconds) if self.seconds else x


def make_model(options: argparse.Namespace) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    width, batch = options.width, options.batch
    if options.model == "transformer":
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, options.layers), torch.randn(batch, 32, width)
    if options.model == "conv":
        blocks = [
            part
            for _ in range(options.layers)
            for part in (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        ]
        return nn.Sequential(*blocks), torch.randn(batch, width, 8, 8)
    layers = [Layer(width, options.sleep) for _ in range(options.layers)]
    return nn.Sequential(*layers), torch.randn(batch, width)


class Training:
    """One model with its optimizer."""

    def __init__(self, options: argparse.Namespace, bucket_mb: float | None) -> None:
        model, self.x = make_model(options)
        self.model: nn.Module = model
        if bucket_mb is not None:
            self.model = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        momentum = 0.0 if options.sleep else 0.9  # sleeping layers need no optimizer work
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=momentum)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def timed(self, steps: int) -> list[float]:
        self.step()
        found = []
        for _ in range(steps):
            began = time.perf_counter()
            self.step()
            found.append(time.perf_counter() - began)
        return found


def main() -> None:
    options = parse()
    others = fork(options.ranks)
    if options.priority:
        go_first()
    run(options)
    failed = [os.waitpid(other, 0)[1] for other in others]
    sys.exit(1 if any(failed) else 0)


def fork(ranks: int) -> list[int]:
    """Become rank 0 and start the other ranks, each in its own session, as launchers do."""
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "RANK": "0"}
    others = []
    for rank in range(1, ranks):
        child = os.fork()
        if child == 0:
            os.setsid()
            os.environ["RANK"] = str(rank)
            return []
        others.append(child)
    return others


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    alone = Training(options, None)
    together = {mb: Training(shared(options), mb) for mb in options.buckets}
    for training in ([alone] if first else []) + list(together.values()):
        training.timed(WARM)
    found = run_rounds(options, alone, together)
    if first:
        record(alone, Path(options.out) / "trace.json")
        (Path(options.out) / "measured.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def shared(options: argparse.Namespace) -> argparse.Namespace:
    """The batch of each rank under DDP."""
    shares = options.ranks if options.strong else 1
    changed = {"batch": options.batch // shares, "sleep": options.sleep / shares}
    return argparse.Namespace(**vars(options) | changed)


def run_rounds(
    options: argparse.Namespace, alone: Training, together: dict[float, Training]
) -> dict[str, Any]:
    first = dist.get_rank() == 0
    world = make_groups()[0]
    sizes = [1 << power for power in range(10, 1 + (options.largest - 1).bit_length(), 2)]
    buffers = Buffers.allocate(elements(sizes[-1], world.size), torch.device("cpu"))
    cpu = torch.device("cpu")
    sweeper = KindSweeper(kind="all_reduce", group=world, buffers=buffers, device=cpu)
    found: dict[str, Any] = {"alone": [], "sweeps": [], "contention": [], "load": []}
    found["together"] = {str(mb): [] for mb in together}
    for number in range(options.rounds):
        parts: list[Any] = ["alone", "sweep", *together]
        random.Random(number).shuffle(parts)
        for part in parts:
            dist.barrier()
            if part == "alone" and first:
                found["alone"].append(alone.timed(options.steps))
            elif part == "sweep":
                budget = round(options.seconds * 1e9)
                found["sweeps"].append(sweeper.run(sizes, budget, number, lambda _: None))
                if world.place is not None and not options.sleep:
                    beside = ContentionTimer(world.place, buffers)
                    found["contention"].append(beside.run(sizes[-1], quick=True))
            elif part != "alone":
                found["together"][str(part)].append(together[part].timed(options.steps))
        found["load"].append(os.getloadavg()[0])
    return found


def record(training: Training, path: Path) -> None:
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=0, warmup=2, active=6, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(8):
            training.step()
            profiler.step()


def go_first() -> None:
    """Let Linux prefer this process's session to the other sessions' work."""
    try:
        Path("/proc/self/autogroup").write_text("-19")
    except OSError as error:
        print(f"no priority: {error}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=("mlp", "conv", "transformer"), default="mlp")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--strong", action="store_true", help="share the batch under DDP")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds a layer")
    parser.add_argument("--buckets", type=float, nargs="+", default=[1.0, 5.0, 25.0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each sweep")
    parser.add_argument("--largest", type=int, default=16 << 20, help="bytes of a sweep")
    parser.add_argument("--priority", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
