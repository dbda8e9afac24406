"""Train T5-base (transformers) to turn made-up text into other made-up text."""

import argparse

import torch
from transformers import T5Config, T5ForConditionalGeneration

BATCH, SOURCE, TARGET, WORDS = 16, 256, 64, 32_128
LEARNING_RATE = 1e-4


def build(tiny=False):
    layers, heads, width = (2, 2, 64) if tiny else (12, 12, 768)
    config = T5Config(
        vocab_size=WORDS,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=heads,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config).train()


def make_batches(size, device, tiny=False):
    source, target = (16, 8) if tiny else (SOURCE, TARGET)
    return [
        (
            torch.randint(WORDS, (size, source), device=device),
            torch.randint(WORDS, (size, target), device=device),
        )
        for _ in range(8)
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
