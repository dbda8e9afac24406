"""A closure that runs forward and backward several times inside one step."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(8, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
x, y = torch.randn(32, 8), torch.randn(32, 1)
for _ in range(18):

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    print(optimizer.step(closure).item().hex())
