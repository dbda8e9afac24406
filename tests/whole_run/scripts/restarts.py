"""For torchrun --max-restarts=1: the first attempt fails after 50 steps, the second trains 120."""

import os

import torch
import torch.distributed as dist
from own_clock import OwnClock
from torch import nn

FAILS_AFTER, STEPS = 50, 120


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    clock = OwnClock()
    for number in range(STEPS):
        if first and number == FAILS_AFTER:
            raise RuntimeError("planted")
        optimizer.zero_grad()
        model(torch.randn(256, 256)).square().mean().backward()
        optimizer.step()
        clock.step()
    clock.say(attempt=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
