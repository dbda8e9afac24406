"""Train a PatchTST (transformers) to continue made-up series."""

import argparse

import torch
from transformers import PatchTSTConfig, PatchTSTForPrediction

BATCH, LENGTH, AHEAD, CHANNELS = 64, 512, 96, 16
LEARNING_RATE = 1e-4


def build(tiny=False):
    width, layers = (32, 2) if tiny else (256, 6)
    config = PatchTSTConfig(
        num_input_channels=CHANNELS, context_length=LENGTH, prediction_length=AHEAD,
        patch_length=16, patch_stride=8, d_model=width, ffn_dim=2 * width,
        num_hidden_layers=layers, num_attention_heads=8,
    )  # fmt: skip
    return PatchTSTForPrediction(config).train()


def make_batches(size, device, tiny=False):
    del tiny
    return [
        (
            torch.randn(size, LENGTH, CHANNELS, device=device),
            torch.randn(size, AHEAD, CHANNELS, device=device),
        )
        for _ in range(4)
    ]


def loss_of(model, batch):
    past, future = batch
    return model(past_values=past, future_values=future).loss


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
