"""Accelerate: epochs with an evaluation and a saved state after each; two batches make a step."""

import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent))
from own_clock import OwnClock

EPOCHS, STEPS, BATCH = 5, 50, 32
torch.manual_seed(0)
torch.set_num_threads(1)


def data(batches):
    return TensorDataset(torch.randn(batches * BATCH, 128), torch.randint(8, (batches * BATCH,)))


def evaluate(accelerator, model, loader):
    model.eval()
    right = 0
    for x, y in loader:
        with torch.no_grad():
            guess = model(x).argmax(1)
        guess, y = accelerator.gather_for_metrics((guess, y))
        right += (guess == y).sum().item()
    return right


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    training, held_out = (
        DataLoader(data(2 * STEPS), BATCH, shuffle=True),
        DataLoader(data(60), BATCH),
    )
    model, optimizer, training, held_out = accelerator.prepare(model, optimizer, training, held_out)
    clock, evaluated, saved = OwnClock(), 0.0, 0.0
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(EPOCHS):
            model.train()
            for x, y in training:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    clock.step()
            began = time.perf_counter()
            evaluate(accelerator, model, held_out)
            evaluated += time.perf_counter() - began
            began = time.perf_counter()
            accelerator.save_state(scratch)
            saved += time.perf_counter() - began
    clock.say(evaluated_ms=1e3 * evaluated, saved_ms=1e3 * saved)


if __name__ == "__main__":
    main()
