"""Residual layers over the rows of a table: nothing but linear layers, norms and dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.resnet50 import train_classifier

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


class RowBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.BatchNorm1d(width),
            nn.Linear(width, 2 * width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(2 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.path(x)


def make_table(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of random numbers; the class is the largest of a few random sums of each row."""
    draw, device = place.generator(), place.device
    sums = torch.randn((config.columns, config.classes), generator=draw, device=device)
    shape = (config.batch, config.columns)
    tables = [torch.randn(shape, generator=draw, device=device) for _ in range(config.batches)]
    return [(rows, (rows @ sums).argmax(1)) for rows in tables]


def build(config: Config, place: TrainingPlace) -> Step:
    blocks = [RowBlock(config.width) for _ in range(config.layers)]
    model = place.put(
        nn.Sequential(
            nn.Linear(config.columns, config.width),
            *blocks,
            nn.BatchNorm1d(config.width),
            nn.Linear(config.width, config.classes),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    return train_classifier(model, optimizer, make_table(config, place))


RTDL_RESNET = {
    "batch": 4096,
    "batches": 4,
    "columns": 200,
    "classes": 10,
    "width": 768,
    "layers": 12,
    "lr": 1e-3,
}
WORKLOAD = TrainingWorkload(
    name="tabular",
    task="classification of rows",
    source="Gorishniy et al., Revisiting Deep Learning Models for Tabular Data, 2021 (ResNet)",
    samples="rows",
    sizes={
        "tiny": {**RTDL_RESNET, "batch": 64, "columns": 16, "width": 64, "layers": 3, "lr": 3e-3},
        "small": RTDL_RESNET,
        "paper": {**RTDL_RESNET, "width": 512, "layers": 8, "batch": 1024},
    },
    targets={
        "tiny": Target(loss=1.0, steps=60),
        "small": Target(loss=1.5, steps=60),
        "paper": Target(loss=1.5, steps=60),
    },
    build=build,
    tags=frozenset({"extra"}),
)
