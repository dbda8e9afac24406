"""Sentences of different lengths, padded to the longest of their batch."""

import random

import torch
from own_clock import OwnClock
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

STEPS, BATCH, SHORT, LONG = 300, 8, 8, 96


def sentences():
    draw = random.Random(0)
    for _ in range(STEPS):
        longest = int(draw.uniform(SHORT, LONG))
        yield from (torch.randint(1000, (draw.randint(8, longest),)) for _ in range(BATCH - 1))
        yield torch.randint(1000, (longest,))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 192)
        self.layers = nn.Sequential(
            nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192), nn.LayerNorm(192)
        )
        self.head = nn.Linear(192, 32)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(
        list(sentences()), BATCH, collate_fn=lambda batch: pad_sequence(batch, batch_first=True)
    )
    clock = OwnClock()
    tokens = []
    for batch in loader:
        scores = model(batch)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch.flatten() % 32)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tokens.append(batch.numel())
        clock.step()
    clock.say(tokens=tokens)


if __name__ == "__main__":
    main()
