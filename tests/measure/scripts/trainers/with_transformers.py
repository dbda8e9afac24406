"""The Hugging Face Trainer on a GPT-2 of a few thousand weights; argument: a run folder to watch.

Two batches are gathered into a step, so that a step and a batch are not the same thing.
"""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

STEPS, BATCH = 18, 2

torch.manual_seed(0)
torch.set_num_threads(1)


class Said(Trainer):
    """A Trainer that says every loss to the bit."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        print(loss.item().hex(), flush=True)
        return loss


callbacks = []
if len(sys.argv) > 1:
    from stepscope.measure.watch import hugging_face

    callbacks.append(hugging_face(sys.argv[1], wait=4, warmup=1, active=2))
config = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=16, vocab_size=32)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (STEPS * BATCH * 2, 16))]
with tempfile.TemporaryDirectory() as out:
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
    )
    model = GPT2LMHeadModel(config)
    Said(model=model, args=arguments, train_dataset=data, callbacks=callbacks).train()
