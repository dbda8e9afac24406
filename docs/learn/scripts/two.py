"""Lessons 5 and 6: data parallel training over gloo; without torchrun one process trains alone."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, BATCH = 6, 768, 16
BACKWARD_SECONDS, SLOW_SECONDS = 0.005, 0.200


class Device(torch.autograd.Function):
    """Stands for a GPU: a layer's backward takes its time and leaves the processor free."""

    @staticmethod
    def forward(_context: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_context: object, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_SECONDS)
        return gradient


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(Device.apply(self.linear(x)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--bucket-mb", type=float, default=25, help="the second fix: 2")
    parser.add_argument("--slow-rank", type=int, default=-1, help="this rank sleeps in each step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    rank = int(os.environ.get("RANK", "0"))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, bucket_cap_mb=options.bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = torch.Generator().manual_seed(rank)  # each rank draws samples of its own
    for step in range(options.steps):
        x = torch.randn(BATCH, WIDTH, generator=samples)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        if rank == options.slow_rank:
            time.sleep(SLOW_SECONDS)  # a throttled, shared or older device
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
