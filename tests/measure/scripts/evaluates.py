"""12 steps in 3 epochs with a loss module, and an evaluation behind each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,)))
for _epoch in range(3):
    model.train()
    for x, y in DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=4):
            criterion(model(x), y)
