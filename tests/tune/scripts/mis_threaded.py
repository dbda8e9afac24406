"""Small operators, and many more threads than cores to run them on."""

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(32)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step in range(400):
    x, y = torch.randn(128, 128), torch.randint(10, (128,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
