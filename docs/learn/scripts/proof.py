"""Lesson 7: many small layers, updated parameter by parameter or in one call."""

import argparse

import torch
from torch import nn

LAYERS, WIDTH, BATCH = 40, 64, 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fused", action="store_true", help="the fix")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = (part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model = nn.Sequential(*layers)
    how = {"fused": True} if options.fused else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **how)
    for step in range(options.steps):
        x = torch.randn(BATCH, WIDTH)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
