"""Small DDP trainings on two gloo ranks, as tests of DDP's remedies run them."""

from __future__ import annotations

HEAD = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
"""

PLAIN = (
    HEAD
    + """\
model = nn.Sequential(nn.Linear(64, 1500), nn.ReLU(), nn.Linear(1500, 400), nn.Linear(400, 4))
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
for step in range(20):
    x, y = torch.randn(8, 64), torch.randint(4, (8,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if step == 5 and dist.get_rank() == 0:
        print("buckets", model._get_ddp_logging_data()["rebuilt_bucket_sizes"])
    optimizer.step()
dist.destroy_process_group()
"""
)

SMALL = (
    HEAD
    + """\
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
"""
)

# Every 4th pass is followed by a step, as a test in the loop says.
GUARDED = (
    SMALL
    + """\
for i in range(24):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    loss = F.cross_entropy(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""
)

# Three passes in a loop of their own, then a step.
COUNTED = (
    SMALL
    + """\
def train(net, passes):
    for step in range(6):
        for part in range(passes):
            x, y = torch.randn(8, 16), torch.randint(4, (8,))
            logits = net(x)
            loss = F.cross_entropy(logits, y) / passes
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


train(model, 3)
dist.destroy_process_group()
"""
)

# A step after every 4 passes, and one after the two that are left; gradients are clipped.
LEFT_OVER = (
    SMALL
    + """\
for i in range(14):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if i % 4 == 3 or i == 13:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
for i in range(8):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""
)

# The script does it right.
OWN_NO_SYNC = (
    SMALL
    + """\
import contextlib

for i in range(12):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    with model.no_sync() if i % 3 < 2 else contextlib.nullcontext():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    if i % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""
)

# Another branch of the model runs in every step; it has a buffer, and a hook of its own.
BRANCHES = (
    HEAD
    + """\
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(16)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.parts[self.calls % 2](self.norm(x))


def all_reduce(group, bucket):
    work = dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


model = DDP(Branches(), find_unused_parameters=True)
model.register_comm_hook(None, all_reduce)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(8):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
"""
)
