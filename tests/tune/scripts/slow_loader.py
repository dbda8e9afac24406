"""Images are slow to read and change at random; what happens to an image is fixed by its index."""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.002)  # stands for a file to read and decode
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 16, 16, generator=generator)
        if torch.rand((), generator=generator) < 0.5:
            image = image.flip(-1)
        return image + 0.1 * torch.randn(3, 16, 16, generator=generator), index % 10


torch.manual_seed(0)
loader = DataLoader(Images(), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Flatten(), nn.Linear(768, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for images, labels in loader:
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
