"""Train an FNet (transformers) to fill gaps in made-up sentences."""

import argparse

import torch
from transformers import FNetConfig, FNetForMaskedLM

BATCH, LENGTH, WORDS = 32, 512, 32_000
LEARNING_RATE = 1e-4


def build(tiny=False):
    width, layers = (32, 2) if tiny else (768, 12)
    config = FNetConfig(
        vocab_size=100 if tiny else WORDS, hidden_size=width, num_hidden_layers=layers,
        intermediate_size=4 * width,
    )  # fmt: skip
    return FNetForMaskedLM(config).train()


def make_batches(size, device, tiny=False):
    words, length = (100, 32) if tiny else (WORDS, LENGTH)
    return [torch.randint(words, (size, length), device=device) for _ in range(4)]


def loss_of(model, batch):
    return model(input_ids=batch, labels=batch).loss


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
