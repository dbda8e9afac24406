"""A workload of `stepscope bench` that times its own steps and prints them as one JSON line.

    python benchmarks/workloads/timed_workload.py gpt2 --size small --steps 80
    torchrun --nproc-per-node=2 benchmarks/workloads/timed_workload.py tabular --steps 400

An ordinary training script: it knows nothing of capture.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
import torch.distributed as dist

from stepscope.bench.catalogue import load
from stepscope.bench.workload import SIZES, TrainingPlace


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int)
    options = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    workload = load(options.name)
    config = workload.config(options.size, {"batch": options.batch} if options.batch else {})
    device = torch.device("cuda" if on_gpu else "cpu")
    step = workload.build(config, TrainingPlace(device, rank=rank, ranks=ranks))
    ends, used = [], []
    for number in range(options.steps):
        loss = step(number)
        ends.append(time.perf_counter())
        used.append(time.process_time())
    if on_gpu:
        torch.cuda.synchronize()
    if rank == 0:
        printed: dict[str, Any] = {
            "loss": loss.item().hex(),
            "steps_s": [b - a for a, b in pairwise(ends)],
            "ends_s": ends,
            "cpu_s": [b - a for a, b in pairwise(used)],
            "peak": torch.cuda.max_memory_allocated() if on_gpu else None,
        }
        print(json.dumps(printed))
    if ranks > 1:
        dist.destroy_process_group()


main()
