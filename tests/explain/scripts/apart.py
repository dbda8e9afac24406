"""Ranks of one job that sum their loss and nothing else: each trains a model of its own."""

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(18):
    optimizer.zero_grad()
    loss = model(torch.randn(32, 256)).square().mean()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())
dist.destroy_process_group()
