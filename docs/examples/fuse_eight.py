"""Eight trainings with other settings, as one array of models."""

import torch
from torch import nn
from torch.nn import functional

from stepscope.fix.fuse import fuse

SETTINGS = [{"lr": lr, "weight_decay": wd} for lr in (1e-2, 3e-3, 1e-3, 3e-4) for wd in (0.0, 0.1)]


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 4),
    )  # fmt: skip


def batch(draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a bright corner, which is the label."""
    labels = torch.randint(4, (32,), generator=draw)
    pictures = torch.randn(32, 1, 8, 8, generator=draw)
    for corner, (row, column) in enumerate(((0, 0), (0, 4), (4, 0), (4, 4))):
        pictures[labels == corner, :, row : row + 4, column : column + 4] += 1.0
    return pictures, labels


def main() -> None:
    torch.manual_seed(0)
    models = [build() for _ in SETTINGS]
    optimizers = [
        torch.optim.AdamW(model.parameters(), **own)
        for model, own in zip(models, SETTINGS, strict=True)
    ]
    array = fuse(models, optimizers)
    draw = torch.Generator().manual_seed(1)
    for _ in range(60):
        pictures, labels = batch(draw)
        losses = functional.cross_entropy(array(pictures), labels)  # one for each model
        array.zero_grad()
        array.backward(losses)
        array.step()
    for own, loss in zip(SETTINGS, losses.each(), strict=True):
        print(own, f"loss {loss.item():.3f}")
    best = min(range(len(array)), key=lambda place: losses.of(place).item())
    torch.save(array.state_of(best), "best.pt")  # loads into build()


if __name__ == "__main__":
    main()
