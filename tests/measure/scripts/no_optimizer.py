"""Updates its weights by hand: no optimizer ever steps."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
weight = torch.zeros(8, 1, requires_grad=True)
for (x,) in DataLoader(TensorDataset(torch.randn(160, 8)), batch_size=8):
    loss = (x @ weight - 1).square().mean()
    loss.backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
        weight.grad = None
    print(loss.item().hex())
