"""Train ViT-base (transformers) on made-up pictures."""

import argparse

import torch
from transformers import ViTConfig, ViTForImageClassification

BATCH, SIDE, CLASSES = 32, 224, 1000
LEARNING_RATE = 1e-4


def build(tiny=False):
    if tiny:
        config = ViTConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            image_size=32,
            num_labels=CLASSES,
        )
    else:
        config = ViTConfig(num_labels=CLASSES)
    return ViTForImageClassification(config).train()


def make_batches(size, device, tiny=False):
    side = 32 if tiny else SIDE
    return [
        (
            torch.randn(size, 3, side, side, device=device),
            torch.randint(CLASSES, (size,), device=device),
        )
        for _ in range(8)
    ]


def loss_of(model, batch):
    pictures, labels = batch
    return model(pixel_values=pictures, labels=labels).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU can train")
    options = parser.parse_args()

    torch.manual_seed(0)
    with torch.device(options.device):  # weights are drawn there: much faster than on the host
        model = build(options.tiny)
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
