"""A Lightning Trainer that validates every 50 batches and saves a checkpoint every 70 steps."""

import sys
import tempfile
import time
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent))
from own_clock import OwnClock

STEPS, BATCH = 290, 32
torch.manual_seed(0)
torch.set_num_threads(1)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 8))
        self.register_buffer("average", torch.randn(20_000_000))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("loss", nn.functional.cross_entropy(self.layers(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Meters(lightning.Callback):
    def __init__(self, folder):
        self.clock, self.folder, self.began = OwnClock(), folder, 0.0
        self.evaluated = self.saved = 0.0

    def on_train_batch_end(self, trainer, *_):
        self.clock.step()
        if trainer.global_step % 70 == 0:
            began = time.perf_counter()
            trainer.save_checkpoint(self.folder / "last.ckpt")
            self.saved += time.perf_counter() - began

    def on_validation_start(self, *_):
        self.began = time.perf_counter()

    def on_validation_end(self, *_):
        self.evaluated += time.perf_counter() - self.began


def data(batches):
    return TensorDataset(torch.randn(batches * BATCH, 128), torch.randint(8, (batches * BATCH,)))


with tempfile.TemporaryDirectory() as scratch:
    meters = Meters(Path(scratch))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        val_check_interval=50,
        num_sanity_val_steps=0,
        callbacks=[meters],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data(STEPS), BATCH), DataLoader(data(60), BATCH))
meters.clock.say(evaluated_ms=1e3 * meters.evaluated, saved_ms=1e3 * meters.saved)
