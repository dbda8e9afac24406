"""Train BERT-base (transformers) on made-up text with every seventh word masked."""

import argparse

import torch
from transformers import BertConfig, BertForMaskedLM

BATCH, LENGTH, WORDS, MASK = 32, 128, 30_522, 103
LEARNING_RATE = 1e-4


def build(tiny=False):
    if tiny:
        config = BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
        )
    else:
        config = BertConfig()
    return BertForMaskedLM(config).train()


def make_batches(size, device, tiny=False):
    return [_masked(size, 16 if tiny else LENGTH, device) for _ in range(8)]


def _masked(size, length, device):
    words = torch.randint(1000, WORDS, (size, length), device=device)
    masked = torch.arange(length, device=device) % 7 == 3
    return words.masked_fill(masked, MASK), words.masked_fill(~masked, -100)


def loss_of(model, batch):
    words, labels = batch
    return model(input_ids=words, labels=labels).loss


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
