"""A small CPU training with nothing to gain: `tune_noise.py real` tunes it and should keep nothing.

The data is made ahead, one thread is enough, and most of the step is one kind of product.
"""

from __future__ import annotations

import torch
from torch import nn

STEPS = 400


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(256, 256), torch.randint(10, (256,))
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
