"""Train a Qwen2 of 150 million weights (transformers) on made-up text: grouped queries."""

import argparse

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

BATCH, LENGTH, WORDS = 16, 512, 32_000
LEARNING_RATE = 1e-4


def build(tiny=False):
    sizes = (64, 2, 4, 2, 128) if tiny else (896, 12, 14, 2, 3584)
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    config = Qwen2Config(vocab_size=WORDS, **dict(zip(names, sizes, strict=True)))
    return Qwen2ForCausalLM(config).train()


def make_batches(size, device, tiny=False):
    shape = (size, 16 if tiny else LENGTH)
    return [torch.randint(WORDS, shape, device=device) for _ in range(8)]


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
