"""A Lightning Trainer on two hosts, as NODE_RANK and MASTER_ADDR describe them."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCH, HOSTS = 18, 4, 2

torch.manual_seed(0)
torch.set_num_threads(1)


class Tiny(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch, _):
        loss = self.layers(batch[0]).square().mean()
        print(f"{self.global_rank} {loss.item().hex()}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


loader = DataLoader(TensorDataset(torch.randn(STEPS * BATCH * HOSTS, 16)), batch_size=BATCH)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    num_nodes=HOSTS,
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Tiny(), loader)
