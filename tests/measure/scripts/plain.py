"""A plain loop in a function, an evaluation in between."""

import sys

import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20):
        x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
        if step % 7 == 6:
            model.eval()
            with torch.no_grad():
                print("eval", model(torch.randn(8, 16)).sum().item().hex())
            model.train()


main()
