"""Train BART-base (transformers) to write made-up text anew."""

import argparse

import torch
from transformers import BartConfig, BartForConditionalGeneration

BATCH, LENGTH, WORDS = 16, 256, 50_265
LEARNING_RATE = 1e-4


def build(tiny=False):
    width, layers, heads = (64, 2, 2) if tiny else (768, 6, 12)
    config = BartConfig(
        vocab_size=WORDS,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        use_cache=False,
    )
    return BartForConditionalGeneration(config).train()


def make_batches(size, device, tiny=False):
    shape = (size, 16 if tiny else LENGTH)
    return [
        tuple(torch.randint(3, WORDS, shape, device=device) for _ in range(2)) for _ in range(8)
    ]


def loss_of(model, batch):
    source, target = batch
    return model(input_ids=source, labels=target).loss


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
