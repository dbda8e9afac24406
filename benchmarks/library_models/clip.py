"""Train CLIP with ViT-B/32 (transformers) on made-up images and captions."""

import argparse

import torch
from transformers import CLIPConfig, CLIPModel

BATCH, LENGTH, WORDS = 128, 77, 49_408
LEARNING_RATE = 1e-5


def build(tiny=False):
    if not tiny:
        return CLIPModel(CLIPConfig()).train()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes = dict(zip(names, (64, 2, 2, 128), strict=True))
    config = CLIPConfig(
        text_config={**sizes, "vocab_size": WORDS}, vision_config={**sizes, "image_size": 64}
    )
    return CLIPModel(config).train()


def make_batches(size, device, tiny=False):
    length, side = (8, 64) if tiny else (LENGTH, 224)
    return [
        (
            torch.randint(WORDS - 1, (size, length), device=device),
            torch.randn(size, 3, side, side, device=device),
        )
        for _ in range(4)
    ]


def loss_of(model, batch):
    texts, images = batch
    return model(input_ids=texts, pixel_values=images, return_loss=True).loss


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
