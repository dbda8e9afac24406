import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 1024)
        self.second = nn.Linear(1024, 1024)
        self.last = nn.Linear(1024, 10)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x))
        return self.last(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--losses")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64 * 50, 128), torch.randint(0, 10, (64 * 50,)))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()
    losses = []
    for step, (x, y) in enumerate(loader):
        if step == args.steps:
            break
        optimizer.zero_grad()
        out = model(x)
        loss = loss_fn(out, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    if args.losses:
        Path(args.losses).write_text(" ".join(losses))


if __name__ == "__main__":
    main()
