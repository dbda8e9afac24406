"""A transformers Trainer that evaluates every 50 steps and saves every 70."""

import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parent.parent))
from own_clock import OwnClock

STEPS, BATCH = 290, 16
torch.manual_seed(0)
torch.set_num_threads(1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 8))
        self.register_buffer("average", torch.randn(20_000_000))

    def forward(self, x, labels):
        scores = self.layers(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


class Timed(Trainer):
    evaluated = saved = 0.0

    def evaluate(self, *args, **kwargs):
        began = time.perf_counter()
        result = super().evaluate(*args, **kwargs)
        self.evaluated += time.perf_counter() - began
        return result

    def _save_checkpoint(self, *args, **kwargs):
        began = time.perf_counter()
        super()._save_checkpoint(*args, **kwargs)
        self.saved += time.perf_counter() - began


class Meters(TrainerCallback):
    def __init__(self):
        self.clock = OwnClock()

    def on_step_end(self, *_, **__):
        self.clock.step()


def data(rows):
    return [{"x": torch.randn(128), "labels": torch.tensor(row % 8)} for row in range(rows)]


with tempfile.TemporaryDirectory() as scratch:
    meters = Meters()
    arguments = TrainingArguments(
        output_dir=scratch,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=70,
        save_total_limit=1,
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Timed(
        model=Classifier(),
        args=arguments,
        train_dataset=data(STEPS * BATCH),
        eval_dataset=data(60 * BATCH),
        callbacks=[meters],
    )
    trainer.train()
meters.clock.say(evaluated_ms=1e3 * trainer.evaluated, saved_ms=1e3 * trainer.saved)
