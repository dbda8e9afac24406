"""PointNet, segmentation: which part of which shape does each point belong to?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.pointnet_cls import (
    PointFeatures,
    each_point,
    make_clouds,
    not_orthogonal,
)

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace

PARTS_OF_A_SHAPE = 3  # bottom, middle, top


class PointNetSegmenter(nn.Module):
    """Every point's logits, from its own features beside the cloud's; and the feature pose."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.features = PointFeatures(width)
        self.layers = each_point(17 * width, 8 * width, 4 * width, 2 * width, 2 * width)
        self.parts = nn.Conv1d(2 * width, config.parts, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        local, cloud, pose = self.features(x)
        cloud = cloud[:, :, None].expand(-1, -1, x.shape[2])
        return self.parts(self.layers(torch.cat((local, cloud), 1))), pose


def part_of_each_point(points: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
    """Shapes are cut at two heights."""
    height = points[:, 2]
    third = (height > -0.2).long() + (height > 0.2).long()
    return PARTS_OF_A_SHAPE * kind[:, None] + third


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(PointNetSegmenter(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    clouds = make_clouds(config, place)
    parts = [part_of_each_point(points, kind) for points, kind in clouds]

    def step(number: int) -> torch.Tensor:
        at = number % len(clouds)
        logits, pose = model(clouds[at][0])
        loss = functional.cross_entropy(logits.float(), parts[at]) + 0.001 * not_orthogonal(pose)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


SHAPENET_PARTS = {
    "batch": 32,
    "batches": 8,  # that training goes round
    "points": 2048,
    "classes": 16,
    "parts": 50,  # of all classes together; at least PARTS_OF_A_SHAPE each
    "width": 64,
    "lr": 1e-3,
}
TINY = {"batch": 16, "points": 128, "classes": 4, "parts": 12, "width": 16, "lr": 3e-3}
WORKLOAD = TrainingWorkload(
    name="pointnet-seg",
    task="point cloud segmentation",
    source="Qi et al., PointNet, 2017, figure 2; ShapeNet parts",
    samples="clouds",
    sizes={
        "tiny": {**SHAPENET_PARTS, **TINY},
        "small": SHAPENET_PARTS,
        "paper": SHAPENET_PARTS,
    },
    targets={
        "tiny": Target(loss=1.2, steps=50),
        "small": Target(loss=3.3, steps=60),
        "paper": Target(loss=3.3, steps=60),
    },
    build=build,
    tags=frozenset({"points"}),
)
