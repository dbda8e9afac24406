"""Gradients of four passes are added up before a step, and DDP exchanges them in every pass."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PASSES = 4


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    for i in range(300 * PASSES):
        x, y = torch.randn(4, 64), torch.randint(10, (4,))
        loss = F.cross_entropy(model(x), y) / PASSES
        loss.backward()
        if (i + 1) % PASSES == 0:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
