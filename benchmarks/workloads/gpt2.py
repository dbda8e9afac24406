"""GPT-2 small (12 layers, 768 wide, 1024 tokens) with AdamW and bf16 autocast; times its own steps.

An unmodified training script: it knows nothing of stepscope. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    heads = options.width // 64
    model = GPT(options.layers, options.width, heads, options.length, options.vocabulary)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    shape = (options.batch, options.length + 1)
    ids = torch.randint(0, options.vocabulary, shape, device=device)
    times = []
    for _ in range(options.steps):
        with torch.autocast(device, torch.bfloat16):
            logits = model(ids[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter())
    if device == "cuda":
        torch.cuda.synchronize()
    gaps = [b - a for a, b in itertools.pairwise(times)]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    printed = {"loss": loss.item().hex(), "steps_s": gaps, "ends_s": times, "peak": peak}
    print(json.dumps(printed))


if __name__ == "__main__":
    main()
