"""Nothing is planted: equal batches, ready in memory."""

import torch
from own_clock import OwnClock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCH = 300, 128


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(STEPS, BATCH, 128), torch.randint(8, (STEPS, BATCH)))
    clock = OwnClock()
    for x, y in DataLoader(data, batch_size=None):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
    clock.say()


if __name__ == "__main__":
    main()
