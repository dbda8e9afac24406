"""A convolutional net."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        return self.head(self.features(images).flatten(1))


def train(model, steps):
    optimizer = SGD(
        model.parameters(),
        lr=0.05,
        momentum=0.9,
        weight_decay=1e-4,  # as in the paper
    )
    for _ in range(steps):
        images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))

        # forward and backward
        logits = model(images)
        loss = F.cross_entropy(logits, labels)

        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    train(Net(), 400)
