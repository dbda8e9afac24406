"""Train a net of principal neighbourhoods (torch_geometric) on one made-up graph."""

import argparse

import torch
from torch.nn import functional
from torch_geometric.nn.models import PNA

BATCH, DEGREE = 60_000, 10  # nodes, edges per node
FEATURES, CLASSES = 64, 40
LEARNING_RATE = 1e-3


def build(tiny=False):
    return PNA(
        FEATURES,
        16 if tiny else 128,
        num_layers=3,
        out_channels=CLASSES,
        aggregators=["mean", "min", "max", "std"],
        scalers=["identity", "amplification", "attenuation"],
        deg=torch.ones(2 * DEGREE, dtype=torch.long),  # how many nodes have so many neighbours
    ).train()


def make_batches(size, device, tiny=False):
    """Full-graph training: one batch, all nodes."""
    nodes = min(size, 200) if tiny else size
    edges = torch.randint(nodes, (2, nodes * DEGREE), device=device)
    features = torch.randn(nodes, FEATURES, device=device)
    labels = torch.randint(CLASSES, (nodes,), device=device)
    return [(features, edges, labels)]


def loss_of(model, batch):
    features, edges, labels = batch
    return functional.cross_entropy(model(features, edges), labels)


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
