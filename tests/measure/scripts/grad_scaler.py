"""GradScaler skips steps whose gradients are not finite."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step in range(20):
    x = torch.randn(16, 8)
    if step in (5, 12):
        x[0, 0] = float("inf")
    loss = model(x).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(loss.item().hex(), scaler.get_scale())
