"""Lesson 3: sixty-four small layers side by side, one operator after the other or all at once."""

import argparse

import torch
from torch import Tensor, nn

GROUPS, BATCH, WIDTH = 64, 4, 16


class Loop(nn.Module):
    """Each group is a layer of its own: one product, one sum, one tanh for each of them."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH) for _ in range(GROUPS))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(layer(x[i])) for i, layer in enumerate(self.layers)])


class Batched(nn.Module):
    """The same layers in one tensor: one batched product, one tanh."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in loop.layers]))
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in loop.layers]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batched", action="store_true", help="the fix")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loop = Loop()
    model = Batched(loop) if options.batched else loop
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(options.steps):
        x = torch.randn(GROUPS, BATCH, WIDTH)
        loss = (model(x) - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
