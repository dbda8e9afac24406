"""Losses are kept without .item(), and each keeps its step's graph: memory grows at every step."""

import resource
import statistics
from pathlib import Path

import torch
from own_clock import OwnClock
from torch import nn

STEPS, BATCH, WIDTH, INPUTS = 250, 512, 1024, 64


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main():
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    history = []
    clock, sizes = OwnClock(), []
    for _ in range(STEPS):
        x = torch.randn(BATCH, INPUTS)
        hidden = model[1](model[0](x))
        loss = model[2](hidden).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append((x, hidden, loss))  # meant: loss.item()
        sizes.append(resident_bytes())
        clock.step()
    late = sizes[STEPS // 4 :]
    apart = len(late) // 2
    rises = [(b - a) / apart for a, b in zip(late, late[apart:], strict=False)]
    clock.say(bytes_per_step=statistics.median(rises))


if __name__ == "__main__":
    main()
