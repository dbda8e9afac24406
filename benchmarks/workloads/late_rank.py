"""DDP on gloo with a rank that is late on purpose: always, now and then, a new one each time, or no
rank at all.

The delay is planted in the forward pass and is a share of the typical step, which all ranks learn
from rank 0. It either spins (the rank works more) or waits for its data.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

LEARN_FROM = 20  # steps


def main() -> None:
    options = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [
        part
        for _ in range(options.layers)
        for part in (nn.Linear(options.width, options.width), nn.ReLU())
    ]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    late = Lateness(options, rank, world)
    x = torch.randn(options.batch, options.width)
    batches = iter(DataLoader(Batches(x, late, options.steps), batch_size=None))
    for step in range(options.steps):
        began = time.perf_counter()
        batch = next(batches)
        spin(late.delay_s(step, "compute"))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        late.learn(step, time.perf_counter() - began)
    if rank == 0:
        print(f"typical step {1e3 * late.typical_s:.1f} ms", flush=True)
    dist.destroy_process_group()


class Lateness:
    """How late this rank is in which step; the same plan on every rank."""

    def __init__(self, options: argparse.Namespace, rank: int, world: int) -> None:
        self._options, self._rank = options, rank
        self._times: list[float] = []
        self.typical_s = 0.0
        plan = random.Random(options.seed)
        share = 1 / options.one_in
        self._whom = [
            plan.randrange(world) if plan.random() < share else -1 for _ in range(options.steps)
        ]

    def learn(self, step: int, took_s: float) -> None:
        self._times.append(took_s)
        if step == LEARN_FROM:
            typical = torch.tensor(sorted(self._times)[len(self._times) // 2])
            dist.broadcast(typical, 0)
            self.typical_s = float(typical)

    def delay_s(self, step: int, cause: str) -> float:
        options = self._options
        if cause != options.cause or options.plant == "nobody":
            return 0.0
        delay = options.late_ms / 1e3 if options.late_ms else options.share * self.typical_s
        if options.plant == "constant":
            return delay if self._rank == options.rank else 0.0
        late = self._whom[step]
        if options.plant == "intermittent":
            late = options.rank if late >= 0 else -1
        return delay if self._rank == late else 0.0


class Batches(IterableDataset[torch.Tensor]):  # type: ignore[misc]
    """The same batch again and again; a rank that is late by its input waits for it."""

    def __init__(self, x: torch.Tensor, late: Lateness, steps: int) -> None:
        self._x, self._late, self._steps = x, late, steps

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(self._steps):
            time.sleep(self._late.delay_s(step, "input"))
            yield self._x


def spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plants = ("nobody", "constant", "intermittent", "wandering")
    parser.add_argument("--plant", choices=plants, default="nobody")
    parser.add_argument("--cause", choices=("compute", "input"), default="compute")
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.10)
    parser.add_argument("--late-ms", type=float, default=0.0)
    parser.add_argument("--one-in", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
