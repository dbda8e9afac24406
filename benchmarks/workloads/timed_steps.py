"""A small CPU training that prints the times of its steps as JSON: python timed_steps.py 60"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn


def main(steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    head = nn.Linear(256, 10)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    times_ms = []
    for _ in range(steps):
        began = time.perf_counter()
        inputs, targets = torch.randn(64, 128), torch.randint(10, (64,))
        loss = nn.functional.cross_entropy(head(model(inputs)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times_ms.append(round(1e3 * (time.perf_counter() - began), 3))
    print(json.dumps(times_ms))


if __name__ == "__main__":
    main(int(sys.argv[1]))
