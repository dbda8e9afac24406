"""Four ranks under DDP whose work is sleep of known length, so that the truth is known."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, LAYERS = 512, 4
FORWARD_S, BACKWARD_S, DATA_S = 0.006, 0.012, 0.004


class Slow(torch.autograd.Function):
    """Passes everything through, late."""

    @staticmethod
    def forward(ctx: object, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor  # type: ignore[attr-defined]
        time.sleep(FORWARD_S * factor)
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD_S * ctx.factor)  # type: ignore[attr-defined]
        return grads[0].clone(), None


class Layer(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Slow.apply(self.inner(x), self.factor)
        return out


class Batches(Dataset[Tensor]):
    def __init__(self, seconds: float, steps: int) -> None:
        self.seconds, self.steps = seconds, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.full((WIDTH,), index / self.steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow-compute", type=int, default=-1)
    parser.add_argument("--slow-input", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=26)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    factor = 1.3 if rank == given.slow_compute else 1.0
    layers = [Layer(factor) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds = 0.04 if rank == given.slow_input else DATA_S
    for batch in DataLoader(Batches(seconds, given.steps)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


main()
