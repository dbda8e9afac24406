"""After 300 steps a second stage begins, and each step runs the layers twice."""

import torch
from own_clock import OwnClock
from torch import nn

STEPS, SECOND_STAGE = 600, 300


class Refiner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU())
        self.passes = 1

    def forward(self, x):
        for _ in range(self.passes):
            x = self.layers(x)
        return x


def main():
    torch.set_num_threads(1)
    model = Refiner()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(192, 384)
    clock = OwnClock()
    for number in range(STEPS):
        model.passes = 1 if number < SECOND_STAGE else 2
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()
        clock.step()
    clock.say(change=SECOND_STAGE)


if __name__ == "__main__":
    main()
