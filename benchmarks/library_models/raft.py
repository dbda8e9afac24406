"""Train a small RAFT (torchvision) on made-up pairs of pictures: their optical flow."""

import argparse

import torch
from torchvision.models.optical_flow import raft_small

BATCH, HEIGHT, WIDTH, UPDATES = 8, 256, 320, 8
LEARNING_RATE = 1e-4


def build(tiny=False):
    del tiny
    return raft_small().train()


def make_batches(size, device, tiny=False):
    height, width = (128, 128) if tiny else (HEIGHT, WIDTH)
    return [
        (
            torch.rand(size, 3, height, width, device=device) * 2 - 1,
            torch.rand(size, 3, height, width, device=device) * 2 - 1,
            torch.randn(size, 2, height, width, device=device),
        )
        for _ in range(4)
    ]


def loss_of(model, batch):
    first, second, flow = batch
    flows = model(first, second, num_flow_updates=UPDATES)
    return sum(0.8 ** (UPDATES - 1 - n) * (one - flow).abs().mean() for n, one in enumerate(flows))


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
