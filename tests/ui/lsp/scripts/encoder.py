"""An encoder of torch's own, trained by a class."""

import torch
from torch import nn


class Trainer:
    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 8)
        parameters = [*self.encoder.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.Adam(parameters)

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        states = self.encoder(tokens)  # costs
        loss = nn.functional.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())
        loss.backward()
        self.optimizer.step()  # costs


def train(batch_size: int = 8) -> None:
    torch.manual_seed(0)
    trainer = Trainer()
    for _ in range(60):
        tokens = torch.randn(batch_size, 32, 64)
        trainer.step(tokens, torch.randint(0, 8, (batch_size, 32)))


train()
