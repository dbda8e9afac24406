"""Losses are kept without .item(), and each keeps its step's graph: memory grows at every step."""

import torch
from own_clock import OwnClock
from torch import nn

STEPS, BATCH, WIDTH = 300, 512, 512


def main():
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    history = []
    clock = OwnClock()
    for _ in range(STEPS):
        hidden = model[1](model[0](torch.randn(BATCH, 64)))
        loss = model[2](hidden).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append((loss, hidden))  # meant: loss.item()
        clock.step()
    clock.say(bytes_per_step=BATCH * WIDTH * 4)


if __name__ == "__main__":
    main()
