"""DistributedDataParallel in three buckets over gloo; rank 1 computes longer when told to."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
late_s = float(sys.argv[1]) if len(sys.argv) > 1 and dist.get_rank() == 1 else 0.0
layers = [nn.Linear(384, 384) for _ in range(6)]
model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    time.sleep(late_s)
    loss = model(torch.randn(256, 384)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
