"""Lesson 1: a small transformer learns to reverse its input; a metric is in plain Python."""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, TOKENS, WORDS, BATCH = 2, 64, 4, 128, 32, 4


class Block(nn.Module):
    """Attention and a feed-forward layer: 12 x WIDTH x WIDTH weights that multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.norm_1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.project(attended.transpose(1, 2).flatten(-2))
        return x + self.narrow(functional.gelu(self.widen(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens) + self.places.weight))


def edit_distance(one: list[int], other: list[int]) -> int:
    """Insertions, deletions and changes that turn one list into the other."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, start=1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(other, start=1):
            best = min(diagonal + (left != right), row[j] + 1, row[j - 1] + 1)
            diagonal, row[j] = row[j], best
    return row[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--metric-every", type=int, default=1, help="the fix: 20")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(options.steps):
        tokens = torch.randint(WORDS, (BATCH, TOKENS))
        wanted = tokens.flip(1)
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % options.metric_every == 0:
            edits = sum(map(edit_distance, logits.argmax(-1).tolist(), wanted.tolist()))
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {edits} edits")


if __name__ == "__main__":
    main()
