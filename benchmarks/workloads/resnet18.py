"""ResNet-18 on random 224 x 224 images with SGD in fp32; times its own steps. One JSON line."""

from __future__ import annotations

import argparse
import itertools
import json
import time

import torch
from torch import nn


def convolution(a: int, b: int, size: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, size, stride, size // 2, bias=False), nn.BatchNorm2d(b))


class Basic(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = convolution(a, b, 3, stride), convolution(b, b, 3, 1)
        self.skip = nn.Identity() if a == b and stride == 1 else convolution(a, b, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.two(torch.relu(self.one(x))) + self.skip(x))


def resnet18(classes: int = 1000) -> nn.Sequential:
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Basic(width, out, stride), Basic(out, out, 1)]
        width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(mode=False)
    model = resnet18().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(options.batch, 3, options.size, options.size, device=device)
    y = torch.randint(0, 1000, (options.batch,), device=device)
    times = []
    for _ in range(options.steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter())
    if device == "cuda":
        torch.cuda.synchronize()
    gaps = [b - a for a, b in itertools.pairwise(times)]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    print(json.dumps({"loss": loss.item().hex(), "steps_s": gaps, "peak": peak}))


main()
