"""torch.compile with shapes that change: another length every 30 steps, each compiled anew.

Argument: the backend (aot_eager needs no C++ compiler).
"""

import statistics
import sys
import time

import torch
from own_clock import OwnClock
from torch import nn

STEPS, EVERY, LAYERS = 210, 30, 3
BACKEND = sys.argv[1] if len(sys.argv) > 1 else "aot_eager"


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers)
    compiled = torch.compile(model, backend=BACKEND, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters())
    clock = OwnClock()
    spent = []
    for number in range(STEPS):
        x = torch.randn(96 + number // EVERY, 256)
        began = time.perf_counter()
        loss = compiled(x).square().mean()
        spent.append(time.perf_counter() - began)
        is_new = number % EVERY == 0
        if is_new and number:
            clock.add(spent[-1] - statistics.median(spent[-EVERY:]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
    clock.say()


if __name__ == "__main__":
    main()
