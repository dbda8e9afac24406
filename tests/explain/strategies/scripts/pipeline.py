"""A pipeline over gloo whose stages sleep a known time for each micro-batch.

pipeline.py SCHEDULE MICROBATCHES FORWARD_MS,... BACKWARD_MS,... [replicas]

With "replicas" every stage has two ranks under DistributedDataParallel.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS = 16, 4


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient.clone(), None, None


class Stage(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.times = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(self.linear(x), *self.times)


torch.set_num_threads(1)
dist.init_process_group("gloo")
name, microbatches = sys.argv[1], int(sys.argv[2])
forward_ms, backward_ms = (list(map(float, arg.split(","))) for arg in sys.argv[3:5])
stages = len(forward_ms)
device = torch.device("cpu")
if "replicas" in sys.argv:
    mesh = init_device_mesh("cpu", (2, stages), mesh_dim_names=("dp", "pp"))
    group, dp = mesh["pp"].get_group(), mesh["dp"].get_group()
else:
    group, dp = dist.group.WORLD, None
place = dist.get_rank(group)
torch.manual_seed(0)
module: nn.Module = Stage(forward_ms[place] / 1e3, backward_ms[place] / 1e3)
if dp is not None:
    module = DistributedDataParallel(module, process_group=dp)
stage = pipelining.PipelineStage(module, place, stages, device, group=group)
schedule = getattr(pipelining, name)(stage, microbatches, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
x, target = torch.randn(2, microbatches * ROWS, WIDTH)
for _ in range(7):
    optimizer.zero_grad()
    if place == 0:
        schedule.step(x)
    elif place == stages - 1:
        schedule.step(target=target, losses=[])
    else:
        schedule.step()
    optimizer.step()
dist.destroy_process_group()
