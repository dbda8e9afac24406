"""Train a graph transformer (torch_geometric) on batches of made-up graphs."""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch_geometric.nn import TransformerConv, global_mean_pool

BATCH, NODES, DEGREE = 512, 30, 4
FEATURES, CLASSES = 32, 10
LEARNING_RATE = 1e-4


class GraphTransformer(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList(TransformerConv(width, width // 4, 4) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, nodes, edges, graph):
        state = self.enter(nodes)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            state = norm(state + layer(state, edges).relu())
        return self.head(global_mean_pool(state, graph))


def build(tiny=False):
    return GraphTransformer(*((16, 2) if tiny else (256, 6))).train()


def make_batches(size, device, tiny=False):
    del tiny
    count = size * NODES
    first = torch.arange(count, device=device).repeat_interleave(DEGREE)
    second = first // NODES * NODES + torch.randint(NODES, first.shape, device=device)
    graph = torch.arange(size, device=device).repeat_interleave(NODES)
    return [
        (
            torch.randn(count, FEATURES, device=device),
            torch.stack([first, second]),
            graph,
            torch.randint(CLASSES, (size,), device=device),
        )
        for _ in range(4)
    ]


def loss_of(model, batch):
    nodes, edges, graph, labels = batch
    return functional.cross_entropy(model(nodes, edges, graph), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU can train")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = build(options.tiny).to(options.device)
    batches = make_batches(options.batch, options.device, options.tiny)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(options.steps):
        loss = loss_of(model, batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
