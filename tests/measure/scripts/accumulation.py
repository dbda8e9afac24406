"""Gradient accumulation: four backward passes to a step."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for micro in range(4 * 18):
    loss = model(torch.randn(8, 16)).square().mean() / 4
    loss.backward()
    if micro % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
