"""Every 25 steps all weights and gradients are written to a log, number by number."""

import json
import tempfile

import torch
from own_clock import OwnClock
from torch import nn
from torch.utils.data import DataLoader

STEPS, EVERY = 310, 25


def main():
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 384), nn.ReLU(), nn.Linear(384, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(torch.randn(STEPS, 192, 256), batch_size=None)
    clock = OwnClock()
    with tempfile.TemporaryFile("w") as log:
        for number, x in enumerate(loader, 1):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.step()
            if number % EVERY == 0:
                with clock.plants():
                    rows = {name: weight.tolist() for name, weight in model.named_parameters()}
                    norms = [row.norm().item() for weight in model.parameters() for row in weight]
                    log.write(json.dumps({"step": number, "norms": norms, **rows}) + "\n")
    clock.say()


if __name__ == "__main__":
    main()
