"""The loop of PyTorch's ImageNet example, with a loader that cannot keep up.

Four workers take 110 ms for a batch and start together, so every fourth step waits.
"""

import random
import time

import torch
from own_clock import OwnClock
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCHES, BATCH, WORKERS = 2, 120, 16, 4


class Pictures(Dataset):
    def __len__(self):
        return BATCHES * BATCH

    def __getitem__(self, index):
        time.sleep(random.uniform(0.98, 1.02) * 0.110 / BATCH)  # read and decode
        return torch.randn(256), index % 10


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def train(loader, model, criterion, optimizer, clock):
    batch_time, data_time = AverageMeter(), AverageMeter()
    model.train()
    end = time.perf_counter()
    for images, target in loader:
        waited = time.perf_counter() - end
        data_time.update(waited)
        clock.add(waited)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
        batch_time.update(time.perf_counter() - end)
        end = time.perf_counter()
    return batch_time.avg, data_time.avg


def main():
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), *(nn.Linear(512, 512), nn.ReLU()) * 4, nn.Linear(512, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    loader = DataLoader(Pictures(), BATCH, num_workers=WORKERS, shuffle=True)
    clock = OwnClock()
    meters = [train(loader, model, nn.CrossEntropyLoss(), optimizer, clock) for _ in range(EPOCHS)]
    clock.say(
        batch_time_ms=1e3 * sum(batch for batch, _ in meters) / EPOCHS,
        data_time_ms=1e3 * sum(data for _, data in meters) / EPOCHS,
        workers=WORKERS,
    )


if __name__ == "__main__":
    main()
