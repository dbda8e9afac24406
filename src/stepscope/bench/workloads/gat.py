"""GAT: what are a node's labels? They follow from its kind, and most neighbours are of its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


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
    """Over the edges that end in the same node; scores are (edges, heads)."""
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


def make_graphs(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, ...]]:
    """`batch` graphs beside each other: features, edges and labels of all their nodes.

    A node's kind shows weakly in its features; four of five neighbours are of its kind.
    """
    draw, device = place.generator(), place.device
    nodes, kinds = config.batch * config.nodes, config.kinds
    kind = torch.arange(nodes, device=device) % kinds
    columns = torch.arange(1, config.features + 1, device=device)
    bits = torch.arange(1, config.labels + 1, device=device)
    labels = (torch.sin(1.7 * (kind[:, None] + 1) * bits) > 0.4).float()
    graphs = []
    for _ in range(config.batches):
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
        own = torch.arange(nodes, device=device).expand(2, -1)
        graphs.append((features, torch.cat((torch.stack((sender, receiver)), own), 1), labels))
    return graphs


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(GAT(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    graphs = make_graphs(config, place)

    def step(number: int) -> torch.Tensor:
        features, edges, labels = graphs[number % len(graphs)]
        scores = model(features, edges).float()
        loss = functional.binary_cross_entropy_with_logits(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


PPI = {
    "batch": 2,
    "batches": 4,  # that training goes round
    "nodes": 2400,  # in a graph; a multiple of kinds
    "degree": 28,
    "kinds": 12,
    "noise": 3.0,  # beside features of size one
    "features": 50,
    "labels": 121,
    "heads": 4,
    "width": 256,
    "lr": 5e-3,
}
TINY = {"nodes": 240, "degree": 10, "kinds": 6, "features": 16, "labels": 20, "width": 16}
WORKLOAD = TrainingWorkload(
    name="gat",
    task="node classification",
    source="Veličković et al., Graph Attention Networks, 2018; the inductive model for PPI",
    samples="graphs",
    sizes={
        "tiny": {**PPI, **TINY},
        "small": {**PPI, "batch": 4},
        "paper": PPI,
    },
    targets={
        "tiny": Target(loss=0.4, steps=60),
        "small": Target(loss=0.6, steps=60),
        "paper": Target(loss=0.6, steps=60),
    },
    build=build,
    tags=frozenset({"attention", "graph"}),
)
