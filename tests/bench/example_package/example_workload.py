"""A small perceptron that learns which half of its inputs is larger."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

from stepscope.bench.workload import Target, TrainingWorkload

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace

# Milliseconds that each step sleeps: a regression to be found.
SLEEP_MS = float(os.environ.get("EXAMPLE_SLEEP_MS", "0"))


def build(config: Config, place: TrainingPlace) -> Step:
    width, layers = config.width, []
    for _ in range(config.layers):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = place.put(nn.Sequential(*layers, nn.Linear(width, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    shape = (config.batches, config.batch, width)
    inputs = torch.randn(shape, generator=place.generator(), device=place.device)
    answers = (inputs[..., : width // 2].sum(-1) > inputs[..., width // 2 :].sum(-1)).long()

    def step(number: int) -> torch.Tensor:
        at = number % config.batches
        loss = nn.functional.cross_entropy(model(inputs[at]), answers[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if SLEEP_MS:
            time.sleep(SLEEP_MS / 1e3)
        return loss

    return step


TINY = {"batch": 512, "batches": 4, "width": 256, "layers": 3, "lr": 0.05}

WORKLOAD = TrainingWorkload(
    name="small-perceptron",
    task="comparing sums",
    source="the example of docs/how-to/own-workloads.md",
    samples="rows",
    sizes={"tiny": TINY, "small": {**TINY, "batch": 8192, "width": 2048}},
    targets={"tiny": Target(loss=0.5, steps=60), "small": Target(loss=0.5, steps=60)},
    build=build,
)
