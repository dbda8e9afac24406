"""Hugging Face Accelerate: its launcher, its optimizer and its loader around a tiny model."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCH = 18, 4

torch.manual_seed(0)
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(STEPS * BATCH * accelerator.num_processes, 16))
loader = DataLoader(data, batch_size=BATCH)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    sys.stdout.write(f"{accelerator.process_index} {loss.item().hex()}\n")  # one write a line
accelerator.end_training()
