"""One rank of a DDP training whose buckets are tuned, and then swept.

Started by benchmarks/bucket_tuner.py on every host. After the tuner has chosen, its choice, the
script's own sizes and every size of the sweep take turns in the same process. Rank 0 prints one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import torch
import torch.distributed as dist
from paused_layers import paused_model
from torch.nn.parallel import DistributedDataParallel

from stepscope.fix.ddp import tune_buckets
from stepscope.fix.ddp.gradient_exchange import (
    BucketSizes,
    bucket_indices,
    rebuild_reducer,
    reducer_parameters,
)

MB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--pause-ms", type=float, default=8.0)
    parser.add_argument("--caps-mb", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 4, 8, 16])
    parser.add_argument("--first-parts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = paused_model(options.layers, options.width, options.pause_ms)
    training = Training(model)
    report: list[str] = []
    tuner = tune_buckets(training.ddp, training.optimizer, report=report.append)
    while tuner.result is None:
        training.step()
    result = tuner.result
    sizes = [
        BucketSizes(first_bytes=int(cap * MB / part), cap_bytes=int(cap * MB))
        for cap in options.caps_mb
        for part in options.first_parts
    ]
    chosen = result.after or result.before
    turns = {layout(training, one): one for one in (*sizes, result.before, chosen)}
    times = sweep(training, list(turns.values()), options)
    if dist.get_rank() == 0:
        swept = {layout(training, one) for one in sizes}
        before, tuned = layout(training, result.before), layout(training, chosen)
        rows = [
            (str(one), times[one], same in swept, same == before, same == tuned)
            for same, one in turns.items()
        ]
        print(json.dumps({"steps": result.steps, "report": report, "rows": rows}), flush=True)
    dist.destroy_process_group()


class Training:
    def __init__(self, model: torch.nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._inputs = torch.randn(8, next(model.parameters()).shape[1])

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(self._inputs).square().mean().backward()
        self.optimizer.step()


def layout(training: Training, sizes: BucketSizes) -> str:
    """Other sizes may give the same buckets."""
    return str(bucket_indices(reducer_parameters(training.ddp)[::-1], sizes))


def sweep(
    training: Training, turns: list[BucketSizes], options: argparse.Namespace
) -> dict[BucketSizes, float]:
    """The median step of each in ms, over rounds in which every one has its turn."""
    order = list(reversed(range(len(reducer_parameters(training.ddp)))))
    times: dict[BucketSizes, list[float]] = {sizes: [] for sizes in turns}
    for number in range(options.rounds):
        for sizes in turns if number % 2 == 0 else reversed(turns):
            rebuild_reducer(training.ddp, order, sizes, stays=False)
            training.step()
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(options.steps):
                training.step()
            times[sizes].append((time.perf_counter() - begun) / options.steps)
    return {sizes: 1e3 * median(ones) for sizes, ones in times.items()}


main()
