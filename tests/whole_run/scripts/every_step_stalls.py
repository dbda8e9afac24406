"""No step is like another: each waits, mostly a little, sometimes a hundred times as long."""

import random
import time

import torch
from own_clock import OwnClock

STEPS = 250

random.seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
clock = OwnClock()
for _ in range(STEPS):
    with clock.plants():
        time.sleep(min(0.5, 0.002 * random.paretovariate(0.9)))
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    clock.step()
clock.say()
