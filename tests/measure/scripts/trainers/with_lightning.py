"""A Lightning Trainer on a tiny model; argument: a run folder to watch.

Two batches are gathered into a step, so that a step and a batch are not the same thing.
"""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCH = 18, 4

torch.manual_seed(0)
torch.set_num_threads(1)


class Tiny(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch, _):
        loss = self.layers(batch[0]).square().mean()
        print(loss.item().hex(), flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


callbacks = []
if len(sys.argv) > 1:
    from stepscope.measure.watch import lightning as watched

    callbacks.append(watched(sys.argv[1], wait=4, warmup=1, active=2))
loader = DataLoader(TensorDataset(torch.randn(STEPS * BATCH * 2, 16)), batch_size=BATCH)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=1,
    accumulate_grad_batches=2,
    callbacks=callbacks,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Tiny(), loader)
