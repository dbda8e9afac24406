"""Translation with LSTM layers: the decoder attends to the source at every word, in a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.gpt2 import make_texts

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace

START = 0  # the word that every target begins with


class AttentionDecoder(nn.Module):
    """Each word's input holds the attention of the word before: time steps cannot run at once."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.cells = nn.ModuleList(
            nn.LSTMCell(width if layer else 2 * width, width) for layer in range(layers)
        )
        self.join = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        words: torch.Tensor,
        source: torch.Tensor,
        hidden: torch.Tensor,
        memory: torch.Tensor,
    ) -> torch.Tensor:
        states = list(zip(hidden.unbind(), memory.unbind(), strict=True))
        attended = torch.zeros_like(words[:, 0])
        outputs = []
        for word in words.unbind(1):
            x = torch.cat((word, attended), 1)
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(self.dropout(x), states[layer])
                x = states[layer][0]
            attended = self.attend(x, source)
            outputs.append(attended)
        return torch.stack(outputs, 1)

    def attend(self, query: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(source, query.unsqueeze(2)).float()
        context = torch.bmm(scores.softmax(1).transpose(1, 2), source).squeeze(1)
        return torch.tanh(self.join(torch.cat((context, query), 1)))


class TranslationLSTM(nn.Module):
    """The source's last states start the decoder."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, layers = config.width, config.layers
        self.source_words = nn.Embedding(config.words, width)
        self.target_words = nn.Embedding(config.words, width)
        self.encoder = nn.LSTM(width, width, layers, batch_first=True, dropout=config.dropout)
        self.decoder = AttentionDecoder(width, layers, config.dropout)
        self.output = nn.Linear(width, config.words, bias=False)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        outputs, (hidden, memory) = self.encoder(self.source_words(source))
        return self.output(self.decoder(self.target_words(target), outputs, hidden, memory))


def make_pairs(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Source and target: the target has, word for word, the vocabulary in reverse."""
    sources = (ids[:, 1:] for ids in make_texts(config, place))
    return [(source, config.known - 1 - source) for source in sources]


def shift(target: torch.Tensor) -> torch.Tensor:
    """The decoder sees the words before the one that it predicts."""
    return functional.pad(target[:, :-1], (1, 0), value=START)


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(TranslationLSTM(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    pairs = make_pairs(config, place)

    def step(number: int) -> torch.Tensor:
        source, target = pairs[number % len(pairs)]
        logits = model(source, shift(target))
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss

    return step


LUONG = {
    "batch": 128,
    "batches": 8,  # that training goes round
    "length": 50,
    "words": 50000,
    "known": 1000,
    "width": 1000,
    "layers": 4,
    "dropout": 0.2,
    "lr": 1e-3,
}
TINY = {
    "batch": 16,
    "length": 8,
    "words": 32,
    "known": 32,
    "width": 64,
    "layers": 2,
    "lr": 5e-3,
    "dropout": 0.0,
}
WORKLOAD = TrainingWorkload(
    name="nmt-lstm",
    task="translation",
    source="Luong et al., Effective Approaches to Attention-based Neural Machine Translation, 2015",
    samples="sentences",
    sizes={
        "tiny": {**LUONG, **TINY},
        "small": {**LUONG, "batch": 64, "length": 25},
        "paper": LUONG,
    },
    targets={
        "tiny": Target(loss=1.0, steps=60),
        "small": Target(loss=9.0, steps=60),
        "paper": Target(loss=9.0, steps=60),
    },
    build=build,
    tags=frozenset({"recurrent", "attention"}),
)
