"""Train DeepLab-v3 with a ResNet-50 (torchvision) on made-up pictures with a class per pixel."""

import argparse

import torch
from torch.nn import functional
from torchvision.models.segmentation import deeplabv3_resnet50

BATCH, SIDE, CLASSES = 16, 256, 21
LEARNING_RATE = 1e-4


def build(tiny=False):
    del tiny
    return deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=CLASSES).train()


def make_batches(size, device, tiny=False):
    side = 64 if tiny else SIDE
    return [
        (
            torch.randn(size, 3, side, side, device=device),
            torch.randint(CLASSES, (size, side, side), device=device),
        )
        for _ in range(4)
    ]


def loss_of(model, batch):
    pictures, labels = batch
    return functional.cross_entropy(model(pictures)["out"], labels)


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
