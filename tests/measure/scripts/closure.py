"""Hands the optimizer a closure that does everything, as Lightning's loop does."""

import time

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(14):

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        time.sleep(0.02)
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    print(optimizer.step(closure=closure).item().hex())
