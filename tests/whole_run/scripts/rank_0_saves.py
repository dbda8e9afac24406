"""Two ranks under DDP. Rank 0 saves a checkpoint every 40 steps while rank 1 waits for it."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from own_clock import OwnClock
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY = 220, 40


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    averages = [torch.randn(4_000_000) for _ in range(4)]
    x = torch.randn(64, 128)
    clock = OwnClock()
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(1, STEPS + 1):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.step()
            if number % EVERY == 0 and dist.get_rank() == 0:
                with clock.plants():
                    torch.save(
                        {"model": model.module.state_dict(), "averages": averages},
                        Path(scratch) / "last.pt",
                    )
    clock.say()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
