"""The loop of PyTorch's ImageNet example, with a loader that cannot keep up.

Four workers take 120 ms for a batch and start together, so every fourth step waits.
"""

import time

import torch
from own_clock import OwnClock
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

EPOCHS, BATCHES, BATCH, WORKERS = 2, 120, 16, 4


class Pictures(Dataset):
    def __len__(self):
        return BATCHES * BATCH

    def __getitem__(self, index):
        return torch.randn(256), index % 10


def read_and_decode(samples):
    time.sleep(0.120)
    return default_collate(samples)


class AverageMeter:
    def __init__(self):
        self.values = []

    def update(self, value):
        self.values.append(value)


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
    return batch_time.values


def main():
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), *(nn.Linear(512, 512), nn.ReLU()) * 4, nn.Linear(512, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    loader = DataLoader(
        Pictures(), BATCH, num_workers=WORKERS, shuffle=True, collate_fn=read_and_decode
    )
    clock = OwnClock()
    batch_times = [
        seconds
        for _ in range(EPOCHS)
        for seconds in train(loader, model, nn.CrossEntropyLoss(), optimizer, clock)
    ]
    clock.say(batch_ms=[1e3 * seconds for seconds in batch_times], workers=WORKERS)


if __name__ == "__main__":
    main()
