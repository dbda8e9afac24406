"""Train a Perceiver (transformers) to classify made-up images, pixel by pixel."""

import argparse

import torch
from torch.nn import functional
from transformers import PerceiverConfig, PerceiverForImageClassificationLearned

BATCH, SIDE, CLASSES = 8, 96, 100
LEARNING_RATE = 1e-4


def build(tiny=False):
    latents, width, layers = (16, 64, 2) if tiny else (256, 512, 8)
    config = PerceiverConfig(
        num_latents=latents,
        d_latents=width,
        num_self_attends_per_block=layers,
        image_size=16 if tiny else SIDE,
        num_labels=CLASSES,
    )
    return PerceiverForImageClassificationLearned(config).train()


def make_batches(size, device, tiny=False):
    side = 16 if tiny else SIDE
    return [
        (
            torch.randn(size, 3, side, side, device=device),
            torch.randint(CLASSES, (size,), device=device),
        )
        for _ in range(4)
    ]


def loss_of(model, batch):
    images, labels = batch
    return functional.cross_entropy(model(inputs=images).logits, labels)


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
