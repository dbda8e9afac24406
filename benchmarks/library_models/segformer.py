"""Train SegFormer-B1 (transformers) on made-up pictures with a class per pixel."""

import argparse

import torch
from transformers import SegformerConfig, SegformerForSemanticSegmentation

BATCH, SIDE, CLASSES = 16, 256, 21
LEARNING_RATE = 6e-5


def build(tiny=False):
    sizes = [16, 16, 32, 32] if tiny else [64, 128, 320, 512]
    config = SegformerConfig(hidden_sizes=sizes, decoder_hidden_size=256, num_labels=CLASSES)
    return SegformerForSemanticSegmentation(config).train()


def make_batches(size, device, tiny=False):
    side = 64 if tiny else SIDE
    return [
        (
            torch.randn(size, 3, side, side, device=device),
            torch.randint(CLASSES, (size, side, side), device=device),
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
