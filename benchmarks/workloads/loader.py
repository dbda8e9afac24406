"""An MLP fed by a DataLoader; times its own steps (about 10 ms on one core).

Passes everything that capture watches at every step: the loader, forward, backward, the optimizer.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH, LAYERS, BATCH, EPOCH = 384, 4, 128, 1000


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Ready in memory: the step never waits for them."""

    def __init__(self) -> None:
        self.rows = torch.randn(64, BATCH, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index % 64], index


def batches() -> Iterator[tuple[torch.Tensor, int]]:
    loader = DataLoader(Samples(), batch_size=None)
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    ends, used = [], []
    for x, _ in islice(batches(), options.steps):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
        used.append(time.process_time())
    printed = {
        "loss": loss.item().hex(),
        "steps_s": [b - a for a, b in pairwise(ends)],
        "ends_s": ends,
        "cpu_s": [b - a for a, b in pairwise(used)],
        "peak": None,
    }
    print(json.dumps(printed))


if __name__ == "__main__":
    main()
