"""A checkpoint every 100 steps: model, optimizer and a moving average, about 100 MB."""

import sys
import tempfile
from pathlib import Path

import torch
from own_clock import OwnClock
from torch import nn

STEPS, EVERY = 420, 100


def save(folder, number, **state):
    path = folder / f"step-{number}.pt"
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def main():
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    averages = [torch.randn(4_000_000) for _ in range(6)]
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(256, 256)
    clock = OwnClock()
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(1, STEPS + 1):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.step()
            if number % EVERY == 0:
                with clock.plants():
                    save(
                        Path(scratch),
                        number,
                        model=model.state_dict(),
                        optimizer=optimizer.state_dict(),
                        averages=averages,
                    )
        print("saved", len(list(Path(scratch).iterdir())), file=sys.stderr)
    clock.say()


if __name__ == "__main__":
    main()
