"""DDP over gloo. Once, the last rank ends itself, its agent and all that started them (a host)."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, DIES_AFTER = 18, 15
died = Path(sys.argv[1])
generations = int(sys.argv[2])  # 0: this process alone; 2: its agent and `stepscope run`, too


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def die():
    died.touch()
    doomed = [os.getpid()]
    for _ in range(generations):
        doomed.append(parent(doomed[-1]))
    for pid in reversed(doomed):
        os.kill(pid, signal.SIGKILL)


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(STEPS):
    if step == DIES_AFTER and dist.get_rank() == dist.get_world_size() - 1 and not died.exists():
        die()
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
