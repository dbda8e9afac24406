"""Train Whisper-small (transformers) on made-up spectrograms and text."""

import argparse

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

BATCH, FRAMES, LENGTH, WORDS = 4, 3000, 128, 51_865
LEARNING_RATE = 1e-4


def build(tiny=False):
    layers, heads, width = (1, 2, 64) if tiny else (12, 12, 768)
    config = WhisperConfig(
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=50 if tiny else FRAMES // 2,
        use_cache=False,
    )
    return WhisperForConditionalGeneration(config).train()


def make_batches(size, device, tiny=False):
    frames, length = (100, 8) if tiny else (FRAMES, LENGTH)
    return [
        (
            torch.randn(size, 80, frames, device=device),
            torch.randint(50_000, (size, length), device=device),
        )
        for _ in range(8)
    ]


def loss_of(model, batch):
    sound, words = batch
    return model(input_features=sound, labels=words).loss


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
