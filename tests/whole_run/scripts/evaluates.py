"""Evaluation in the middle of training: every 50 steps, or after each epoch of 50.

Argument: steps (model.eval, no_grad), epochs (a function that a trainer class calls, over a loader
of its own), or no_grad (the mode is never switched, as in models without dropout).
"""

import sys

import torch
from own_clock import OwnClock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, EVERY, BATCH, ROUNDS = 260, 50, 64, 120
HOW = sys.argv[1] if len(sys.argv) > 1 else "steps"

torch.manual_seed(0)
torch.set_num_threads(1)


def build():
    return nn.Sequential(
        nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)
    )


def fit(model, optimizer, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum() for x, y in loader)
    model.train()
    return right / len(loader.dataset)


def set_of(batches):
    return TensorDataset(torch.randn(batches * BATCH, 128), torch.randint(8, (batches * BATCH,)))


def by_steps(clock):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    training, held_out = DataLoader(set_of(STEPS), BATCH), DataLoader(set_of(ROUNDS), BATCH)
    for number, (x, y) in enumerate(training, 1):
        fit(model, optimizer, x, y)
        clock.step()
        if number % EVERY == 0:
            with clock.plants():
                accuracy(model, held_out)


class Trainer:
    def __init__(self, clock):
        self.clock, self.model = clock, build()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.training = DataLoader(set_of(EVERY), BATCH, shuffle=True)
        self.held_out = DataLoader(set_of(ROUNDS), BATCH)

    def run(self):
        for epoch in range(STEPS // EVERY):
            for x, y in self.training:
                fit(self.model, self.optimizer, x, y)
                self.clock.step()
            with self.clock.plants():
                self.validate(epoch)

    def validate(self, epoch):
        share = accuracy(self.model, self.held_out)
        print(f"epoch {epoch}: {share:.3f}", file=sys.stderr)


def without_modes(clock):
    """Batches come from a function, as in nanoGPT; evaluation is the same forward pass."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(4096, 128)

    def batch():
        at = torch.randint(4096, (BATCH,))
        return data[at], at % 8

    for number in range(1, STEPS + 1):
        fit(model, optimizer, *batch())
        clock.step()
        if number % EVERY == 0:
            with clock.plants(), torch.no_grad():
                for _ in range(ROUNDS):
                    x, y = batch()
                    nn.functional.cross_entropy(model(x), y).item()


def main():
    clock = OwnClock()
    if HOW == "steps":
        by_steps(clock)
    elif HOW == "epochs":
        Trainer(clock).run()
    else:
        without_modes(clock)
    clock.say()


if __name__ == "__main__":
    main()
