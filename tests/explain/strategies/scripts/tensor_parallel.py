"""parallelize_module over gloo; with "sharded" a 2 x 2 mesh: fully_shard over tensor parallel."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 512)
        self.down = nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


torch.set_num_threads(1)
dist.init_process_group("gloo")
both = "sharded" in sys.argv
if both:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
else:
    tp = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = nn.Sequential(*[Block() for _ in range(3)])
for block in model:
    parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if both:
        fully_shard(block, mesh=mesh["dp"])
if both:
    fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(mesh["dp"].get_local_rank() if both else 0)
for _ in range(8):
    loss = model(torch.randn(128, 128)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
