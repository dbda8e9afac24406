"""Nothing to find: double precision, matrix products of some size, a fused optimizer."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
x, y = torch.randn(192, 256).double(), torch.randn(192, 256).double()

for step in range(400):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
