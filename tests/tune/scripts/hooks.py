"""Hooks in the manner of Lightning: the module says what a step is, another class loops."""

import torch
import torch.nn.functional as F
import torch.optim as optim
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 128))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return F.mse_loss(self(x), x)

    def configure_optimizers(self):
        return optim.Adam(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, loss, batch_idx):
        if batch_idx % 100 == 0:
            print(f"batch {batch_idx}: {loss:.4f}")


class Fitter:
    def __init__(self, max_steps):
        self.max_steps = max_steps

    def fit(self, module, loader):
        optimizer = module.configure_optimizers()
        module.train()
        step = 0
        while step < self.max_steps:
            for batch in loader:
                self.run_batch(module, optimizer, batch, step)
                step += 1
                if step == self.max_steps:
                    return

    def run_batch(self, module, optimizer, batch, step):
        def closure():
            optimizer.zero_grad()
            loss = module.training_step(batch, step)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        module.on_train_batch_end(loss.detach(), step)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2048, 128))
    Fitter(max_steps=400).fit(Module(), DataLoader(data, batch_size=32, shuffle=True))
