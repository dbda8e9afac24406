"""Nodes of graphs and clouds of points: GAT, PointNet for classes and for parts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Target, TrainingPlace, TrainingWorkload
from stepscope.bench.workloads.building_blocks import (
    Labelled,
    in_batches,
    in_sizes,
    stacked,
    train_on,
)

# GAT: what are a node's labels? They follow from its kind, and most neighbours are of its kind.


class GraphAttention(nn.Module):
    """Each node takes a weighted mean of its neighbours; each head weighs for itself."""

    def __init__(self, features: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.project = nn.Linear(features, heads * width, bias=False)
        self.as_sender = nn.Parameter(torch.empty(heads, width))
        self.as_receiver = nn.Parameter(torch.empty(heads, width))
        self.bias = nn.Parameter(torch.zeros(heads, width))
        for weight in (self.project.weight, self.as_sender, self.as_receiver):
            nn.init.xavier_uniform_(weight)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        sender, receiver = edges
        x = self.project(x).reshape(len(x), self.heads, self.width)
        sent, received = ((x * w).sum(2).float() for w in (self.as_sender, self.as_receiver))
        scores = functional.leaky_relu(sent[sender] + received[receiver], 0.2)
        share = softmax_by_receiver(scores, receiver, len(x)).to(x.dtype)
        messages = x[sender] * share[:, :, None]
        gathered = torch.zeros_like(x).index_add(0, receiver, messages)
        return gathered + self.bias


def softmax_by_receiver(scores: torch.Tensor, receiver: torch.Tensor, nodes: int) -> torch.Tensor:
    """Take the softmax over the edges that end in the same node; scores are (edges, heads)."""
    where = receiver[:, None].expand_as(scores)
    largest = scores.new_full((nodes, scores.shape[1]), -torch.inf)
    largest = largest.scatter_reduce(0, where, scores.detach(), "amax")
    weights = (scores - largest[receiver]).exp()
    total = weights.new_zeros(largest.shape).index_add(0, receiver, weights)
    return weights / total[receiver]


class GAT(nn.Module):
    """Three layers; the second adds its input, the last averages its heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        inner = config.heads * config.width
        self.first = GraphAttention(config.features, config.heads, config.width)
        self.second = GraphAttention(inner, config.heads, config.width)
        self.last = GraphAttention(inner, config.heads * 3 // 2, config.labels)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = functional.elu(self.first(x, edges).flatten(1))
        x = functional.elu(self.second(x, edges).flatten(1) + x)
        return self.last(x, edges).mean(1)


@in_batches
def make_graphs(config: Config, draw: torch.Generator) -> Iterator[tuple[torch.Tensor, ...]]:
    """`batch` graphs beside each other: features, edges and labels of all their nodes.

    A node's kind shows weakly in its features; four of five neighbours are of its kind.
    """
    device, nodes, kinds = draw.device, config.batch * config.nodes, config.kinds
    kind = torch.arange(nodes, device=device) % kinds
    columns = torch.arange(1, config.features + 1, device=device)
    bits = torch.arange(1, config.labels + 1, device=device)
    labels = (torch.sin(1.7 * (kind[:, None] + 1) * bits) > 0.4).float()
    while True:
        noise = torch.randn(nodes, config.features, generator=draw, device=device)
        features = torch.sin(2.9 * (kind[:, None] + 1) * columns) + config.noise * noise
        receiver = torch.arange(nodes, device=device).repeat(config.degree)
        count = receiver.numel()
        neighbour = torch.randint(config.nodes // kinds, (count,), generator=draw, device=device)
        other = torch.randint(kinds, (count,), generator=draw, device=device)
        alike = torch.rand(count, generator=draw, device=device) < 0.8
        # Numbers inside a graph count up by `kinds` within one kind.
        first = receiver - receiver % config.nodes
        sender = first + neighbour * kinds + torch.where(alike, kind[receiver], other)
        to_itself = torch.arange(nodes, device=device).expand(2, -1)
        yield features, torch.cat((torch.stack((sender, receiver)), to_itself), 1), labels


def labels_loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Compare the score of each label; the labels are the batch's last part."""
    *inputs, labels = batch
    return functional.binary_cross_entropy_with_logits(model(*inputs).float(), labels)


# `nodes` are those of a graph, a multiple of `kinds`; `noise` is beside features of size one.
PPI = {
    "batch": 2, "batches": 4, "nodes": 2400, "degree": 28, "kinds": 12, "noise": 3.0,
    "features": 50, "labels": 121, "heads": 4, "width": 256, "lr": 5e-3,
}  # fmt: skip
GAT_TINY = {"nodes": 240, "degree": 10, "kinds": 6, "features": 16, "labels": 20, "width": 16}
GAT_WORKLOAD = TrainingWorkload(
    name="gat",
    task="node classification",
    source="Veličković et al., Graph Attention Networks, 2018; the inductive model for PPI",
    samples="graphs",
    sizes=in_sizes(PPI, tiny=GAT_TINY, small={"batch": 4}),
    targets={"tiny": Target(0.4, 60), "small": Target(0.6, 60), "paper": Target(0.6, 60)},
    build=train_on(make_graphs, GAT, loss=labels_loss),
    tags=frozenset({"attention", "graph"}),
)


# PointNet: which shape is it that these points lie on? An ellipsoid's axes tell its class.


def point_layers(*widths: int) -> nn.Module:
    """Return layers that all points share, on (batch, features, points)."""
    return stacked(
        widths, lambda width, out: (nn.Conv1d(width, out, 1), nn.BatchNorm1d(out), nn.ReLU())
    )


def cloud_layers(*widths: int) -> nn.Module:
    """Return layers on a cloud's summary: (batch, features)."""
    return stacked(
        widths, lambda width, out: (nn.Linear(width, out), nn.BatchNorm1d(out), nn.ReLU())
    )


class TNet(nn.Module):
    """Predicts the matrix that turns a cloud, or its features, into a common pose."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.points = point_layers(features, width, 2 * width, 16 * width)
        self.cloud = cloud_layers(16 * width, 8 * width, 4 * width)
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
        self.early = point_layers(3, width, width)
        self.late = point_layers(width, width, 2 * width, 16 * width)

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
            cloud_layers(16 * width, 8 * width, 4 * width),
            nn.Dropout(0.3),
            nn.Linear(4 * width, config.classes),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, cloud, pose = self.features(x)
        return self.head(cloud), pose


def not_orthogonal(pose: torch.Tensor) -> torch.Tensor:
    """Return how far a pose is from a rotation: the mean of ||I - AA'||², which training keeps
    small."""
    pose = pose.float()
    identity = torch.eye(pose.shape[1], device=pose.device)
    return (torch.bmm(pose, pose.transpose(1, 2)) - identity).square().sum((1, 2)).mean()


@in_batches
def make_clouds(config: Config, draw: torch.Generator) -> Iterator[Labelled]:
    """Points (batch, 3, points) near an ellipsoid whose axes follow from its class."""
    device, shape = draw.device, (config.batch, 3, config.points)
    speeds = torch.tensor([1.0, 2.3, 3.7], device=device)
    while True:
        kind = torch.randint(config.classes, (config.batch,), generator=draw, device=device)
        axes = 1 + 0.7 * torch.sin((kind[:, None] + 1) * speeds)
        sphere = functional.normalize(torch.randn(shape, generator=draw, device=device))
        noise = torch.randn(shape, generator=draw, device=device)
        yield axes[:, :, None] * sphere + 0.02 * noise, kind


def posed_loss(model: nn.Module, batch: Labelled) -> torch.Tensor:
    points, labels = batch
    logits, pose = model(points)
    return functional.cross_entropy(logits.float(), labels) + 0.001 * not_orthogonal(pose)


MODELNET40 = {"batch": 32, "batches": 8, "points": 1024, "classes": 40, "width": 64, "lr": 1e-3}
POINTNET_CLS_WORKLOAD = TrainingWorkload(
    name="pointnet-cls",
    task="point cloud classification",
    source="Qi et al., PointNet, 2017; ModelNet40 (3.5 M)",
    samples="clouds",
    sizes=in_sizes(
        MODELNET40,
        tiny={"batch": 16, "points": 128, "classes": 8, "width": 16, "lr": 3e-3},
        small={"batch": 256},
    ),
    targets={"tiny": Target(1.0, 50), "small": Target(3.3, 60), "paper": Target(3.3, 60)},
    build=train_on(make_clouds, PointNetClassifier, loss=posed_loss),
    tags=frozenset({"points"}),
)


# PointNet, segmentation: which part of which shape does each point belong to?

PARTS_OF_A_SHAPE = 3  # bottom, middle, top


class PointNetSegmenter(nn.Module):
    """Every point's logits, from its own features beside the cloud's; and the feature pose."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.features = PointFeatures(width)
        self.layers = point_layers(17 * width, 8 * width, 4 * width, 2 * width, 2 * width)
        self.parts = nn.Conv1d(2 * width, config.parts, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        local, cloud, pose = self.features(x)
        cloud = cloud[:, :, None].expand(-1, -1, x.shape[2])
        return self.parts(self.layers(torch.cat((local, cloud), 1))), pose


def part_of_each_point(points: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
    """Cut shapes at two heights."""
    height = points[:, 2]
    third = (height > -0.2).long() + (height > 0.2).long()
    return PARTS_OF_A_SHAPE * kind[:, None] + third


def make_parts(config: Config, place: TrainingPlace) -> list[Labelled]:
    clouds = make_clouds(config, place)
    return [(points, part_of_each_point(points, kind)) for points, kind in clouds]


# `parts` are those of all classes together; at least PARTS_OF_A_SHAPE each.
SHAPENET_PARTS = {
    "batch": 32, "batches": 8, "points": 2048, "classes": 16, "parts": 50, "width": 64, "lr": 1e-3,
}  # fmt: skip
POINTNET_SEG_TINY = {"batch": 16, "points": 128, "classes": 4, "parts": 12, "width": 16, "lr": 3e-3}
POINTNET_SEG_WORKLOAD = TrainingWorkload(
    name="pointnet-seg",
    task="point cloud segmentation",
    source="Qi et al., PointNet, 2017, figure 2; ShapeNet parts",
    samples="clouds",
    sizes=in_sizes(SHAPENET_PARTS, tiny=POINTNET_SEG_TINY),
    targets={"tiny": Target(1.2, 50), "small": Target(3.3, 60), "paper": Target(3.3, 60)},
    build=train_on(make_parts, PointNetSegmenter, loss=posed_loss),
    tags=frozenset({"points"}),
)
