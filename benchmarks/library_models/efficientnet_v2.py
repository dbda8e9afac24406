"""Train an EfficientNetV2-S (torchvision) on made-up pictures."""

import argparse

import torch
from torch.nn import functional
from torchvision.models import efficientnet_v2_s

BATCH, SIDE, CLASSES = 64, 224, 1000
LEARNING_RATE = 1e-4


def build(tiny=False):
    return efficientnet_v2_s(num_classes=10 if tiny else CLASSES).train()


def make_batches(size, device, tiny=False):
    side, classes = (32, 10) if tiny else (SIDE, CLASSES)
    return [
        (
            torch.randn(size, 3, side, side, device=device),
            torch.randint(classes, (size,), device=device),
        )
        for _ in range(4)
    ]


def loss_of(model, batch):
    pictures, labels = batch
    return functional.cross_entropy(model(pictures), labels)


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
