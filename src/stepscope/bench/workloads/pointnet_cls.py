"""PointNet: which shape is it that these points lie on? An ellipsoid's axes tell its class."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


def each_point(*widths: int) -> nn.Sequential:
    """Layers that all points share, on (batch, features, points)."""
    layers: list[nn.Module] = []
    for width, out in pairwise(widths):
        layers += [nn.Conv1d(width, out, 1), nn.BatchNorm1d(out), nn.ReLU()]
    return nn.Sequential(*layers)


def whole_cloud(*widths: int) -> nn.Sequential:
    """Layers on a cloud's summary: (batch, features)."""
    layers: list[nn.Module] = []
    for width, out in pairwise(widths):
        layers += [nn.Linear(width, out), nn.BatchNorm1d(out), nn.ReLU()]
    return nn.Sequential(*layers)


class TNet(nn.Module):
    """Predicts the matrix that turns a cloud, or its features, into a common pose."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.points = each_point(features, width, 2 * width, 16 * width)
        self.cloud = whole_cloud(16 * width, 8 * width, 4 * width)
        self.matrix = nn.Linear(4 * width, features * features)
        nn.init.zeros_(self.matrix.weight)
        with torch.no_grad():
            self.matrix.bias.copy_(torch.eye(features).flatten())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entries = self.matrix(self.cloud(self.points(x).amax(2)))
        return entries.reshape(len(x), x.shape[1], x.shape[1])


class PointFeatures(nn.Module):
    """Of every point (width), of the cloud (16 widths), and the matrix that aligned the first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_pose, self.feature_pose = TNet(3, width), TNet(width, width)
        self.early = each_point(3, width, width)
        self.late = each_point(width, width, 2 * width, 16 * width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.early(torch.bmm(self.input_pose(x), x))
        pose = self.feature_pose(x)
        local = torch.bmm(pose, x)
        return local, self.late(local).amax(2), pose


class PointNetClassifier(nn.Module):
    """The class's logits, and the feature pose."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.features = PointFeatures(width)
        self.head = nn.Sequential(
            whole_cloud(16 * width, 8 * width, 4 * width),
            nn.Dropout(0.3),
            nn.Linear(4 * width, config.classes),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, cloud, pose = self.features(x)
        return self.head(cloud), pose


def not_orthogonal(pose: torch.Tensor) -> torch.Tensor:
    """How far a pose is from a rotation: the mean of ||I - AA'||², which training keeps small."""
    pose = pose.float()
    identity = torch.eye(pose.shape[1], device=pose.device)
    return (torch.bmm(pose, pose.transpose(1, 2)) - identity).square().sum((1, 2)).mean()


def make_clouds(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points (batch, 3, points) near an ellipsoid whose axes follow from its class."""
    draw, device = place.generator(), place.device
    speeds = torch.tensor([1.0, 2.3, 3.7], device=device)
    clouds = []
    for _ in range(config.batches):
        kind = torch.randint(config.classes, (config.batch,), generator=draw, device=device)
        axes = 1 + 0.7 * torch.sin((kind[:, None] + 1) * speeds)
        shape = (config.batch, 3, config.points)
        sphere = functional.normalize(torch.randn(shape, generator=draw, device=device))
        noise = torch.randn(shape, generator=draw, device=device)
        clouds.append((axes[:, :, None] * sphere + 0.02 * noise, kind))
    return clouds


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(PointNetClassifier(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    clouds = make_clouds(config, place)

    def step(number: int) -> torch.Tensor:
        points, kind = clouds[number % len(clouds)]
        logits, pose = model(points)
        loss = functional.cross_entropy(logits.float(), kind) + 0.001 * not_orthogonal(pose)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


MODELNET40 = {
    "batch": 32,
    "batches": 8,  # that training goes round
    "points": 1024,
    "classes": 40,
    "width": 64,
    "lr": 1e-3,
}
WORKLOAD = TrainingWorkload(
    name="pointnet-cls",
    task="point cloud classification",
    source="Qi et al., PointNet, 2017; ModelNet40 (3.5 M)",
    samples="clouds",
    sizes={
        "tiny": {**MODELNET40, "batch": 16, "points": 128, "classes": 8, "width": 16, "lr": 3e-3},
        "small": {**MODELNET40, "batch": 256},
        "paper": MODELNET40,
    },
    targets={
        "tiny": Target(loss=1.0, steps=50),
        "small": Target(loss=3.3, steps=60),
        "paper": Target(loss=3.3, steps=60),
    },
    build=build,
    tags=frozenset({"points"}),
)
