"""A job of one step."""

import torch
from own_clock import OwnClock

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
clock = OwnClock()
model(torch.randn(8, 64)).square().mean().backward()
optimizer.step()
clock.step()
clock.say()
