"""A perceptron on a DataLoader; its options come from the command line."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(256, width)
        self.last = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))  # costs
        return self.last(hidden)  # costs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
    loader = DataLoader(data, batch_size=options.batch_size, shuffle=True)
    model = Perceptron(options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()  # costs


if __name__ == "__main__":
    main()
