"""Lesson 2: a data set whose samples take 8 ms each to fetch, and a model that waits for them."""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

FETCH_SECONDS, BATCH, ROWS, WIDTH = 0.008, 8, 64, 256


class Remote(Dataset[Tensor]):
    """Stands for a disk, a network or a decoder: a sample takes time before it is there."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(FETCH_SECONDS)
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workers", type=int, default=0, help="the fix: 4")
    parser.add_argument("--prefetch", type=int, default=2, help="batches ahead, for each worker")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loader = DataLoader(
        Remote(options.steps * BATCH),
        batch_size=BATCH,
        num_workers=options.workers,
        prefetch_factor=options.prefetch if options.workers else None,
    )
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(loader):
        loss = nn.functional.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
