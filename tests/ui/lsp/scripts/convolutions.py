"""Convolutions without functions: everything stands at the top level."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(8),
    nn.Flatten(),
    nn.Linear(1024, 10),
)
batch_size = 16
images = torch.randn(batch_size, 3, 24, 24)
labels = torch.randint(0, 10, (batch_size,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for _ in range(60):
    optimizer.zero_grad()
    outputs = model(images)  # costs
    loss = nn.functional.cross_entropy(outputs, labels)
    loss.backward()
    optimizer.step()
