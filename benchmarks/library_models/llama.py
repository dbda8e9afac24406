"""Train a Llama of 200 M parameters (transformers) on made-up text."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, LENGTH, WORDS = 8, 512, 32_000
LEARNING_RATE = 3e-4


def build(tiny=False):
    layers, width = (2, 64) if tiny else (12, 1024)
    config = LlamaConfig(
        vocab_size=WORDS if not tiny else 500,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(width // 256, 1),
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def make_batches(size, device, tiny=False):
    words, length = (500, 32) if tiny else (WORDS, LENGTH)
    return [torch.randint(words, (size, length), device=device) for _ in range(8)]


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
