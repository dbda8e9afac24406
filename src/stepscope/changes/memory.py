"""What a step computes and keeps: batches, activations, recurrences, attention."""

from __future__ import annotations

from stepscope.changes.change import Application, ApplyStage, Change, Code, Effect, WhatIf
from stepscope.records.change_values import read_target

_FACTORS = {0.5: "half", 2.0: "twice"}


def describe_factor(value: str) -> str:
    """2 is twice, 0.5 is half, 3 is 3 times."""
    try:
        factor = float(value.removeprefix("x"))
    except ValueError:
        return value
    return _FACTORS.get(factor) or f"{factor:g} times"


def _label_batch(value: str) -> str:
    if value.startswith("x"):
        return f"{describe_factor(value)} the batch"
    return f"batch {value}" if value else "batch"


def _label_checkpoint(value: str) -> str:
    labels = {
        "blocks": "activation checkpointing of every block",
        "none": "no activation checkpointing",
    }
    return labels.get(value, f"checkpoint={value}" if value else "checkpoint")


def _label_save_memory(value: str) -> str:
    try:
        return f"recomputing cheap activations ({read_target(value).words})"
    except ValueError:
        return "recomputing cheap activations"


CHANGES = (
    Change(
        "activation-checkpointing",
        "Wrap blocks in torch.utils.checkpoint: backward then recomputes their activations",
        application=Application(
            Code("fix.remedies.memory:ACTIVATION_CHECKPOINTING"),
            Effect.BIT_IDENTICAL,
            saves="memory",
        ),
        setting="checkpoint=blocks",
    ),
    Change(
        "scan-backward",
        "Call stepscope.fix.scan.scan_backward(model): it runs the backward pass of nn.RNN, "
        "nn.GRU and nn.LSTM in chunks at the same time",
        application=Application(Code("fix.scan.remedy:FIX"), Effect.ROUNDING),
        setting="scan",
    ),
    Change(
        "save-memory",
        "Call stepscope.fix.save_memory(model): it saves less for backward, by recomputing "
        "what is cheap and encoding what compresses exactly",
        prediction=WhatIf(
            Code("predict.whatifs.save_memory:predict"),
            help="save less for backward: within 5%, half (0.5), a budget (12GB), for 2x the "
            "batch, or max",
            label=_label_save_memory,
            stage=ApplyStage.RECOMPUTE,
            usual=("5%",),
            saves_memory=("5%",),
        ),
        application=Application(
            Code("fix.remedies.memory:SAVE_MEMORY"),
            Effect.BIT_IDENTICAL,
            values=("5%", "15%"),
            family="recompute",
            saves="memory",
        ),
        setting="save-memory=5%",
    ),
    Change(
        "sdpa",
        "Replace hand-written attention by torch.nn.functional.scaled_dot_product_attention",
        application=Application(
            Code("fix.remedies.attention:SDPA"), Effect.ROUNDING, patch_only=True
        ),
    ),
    Change(
        "checkpoint",
        prediction=WhatIf(
            Code("predict.whatifs.checkpoint:predict"),
            help="recompute blocks in backward (blocks), or stop doing so (none)",
            label=_label_checkpoint,
            stage=ApplyStage.RECOMPUTE,
            usual=("none", "blocks"),
            saves_memory=("blocks",),
            joins_peak=True,
        ),
    ),
    Change(
        "no-checkpoint",
        "Take torch.utils.checkpoint away from some blocks: use it on only as many as memory "
        "requires",
        predicted_as=("checkpoint=none",),
    ),
    Change(
        "scan",
        prediction=WhatIf(
            Code("predict.whatifs.scan:predict"),
            help="backward through recurrent layers in chunks that run at the same time",
            label="scan backward",
            stage=ApplyStage.SCALE,
            takes_value=False,
            keeps_peak=True,
            needs_ceilings=False,
        ),
    ),
    Change(
        "truncate-backward",
        "Measure how far back the gradient reaches: stepscope.fix.scan.gradient_horizon. If "
        "only N steps matter, detach the state every 2N steps",
    ),
    Change(
        "batch",
        "Use a larger batch: each operator has more to do per call",
        prediction=WhatIf(
            Code("predict.whatifs.batch:predict_batch"),
            help="another batch size, as a number or a factor (x2)",
            label=_label_batch,
            stage=ApplyStage.BATCH,
            usual=("x2",),
            joins_peak=True,
        ),
        predicted_as=("batch=x2",),
    ),
    Change(
        "fuse",
        "Train several of these models together in one process: `stepscope sweep`, or "
        "stepscope.fix.fuse",
        prediction=WhatIf(
            Code("predict.whatifs.fuse:predict"),
            help="train N models of one architecture together, for N times the samples (fuse=8)",
            label="{} models trained together",
            stage=ApplyStage.BATCH,
        ),
        predicted_as=("fuse=8", "fuse=16", "fuse=32"),
    ),
    Change(
        "accumulate",
        "Accumulate gradients over N passes under no_sync(): ranks then communicate once in N"
        " passes",
        prediction=WhatIf(
            Code("predict.whatifs.batch:predict_accumulate"),
            help="N micro-batches per optimizer step (accumulate=4)",
            label="{} micro-batches per step",
            stage=ApplyStage.ACCUMULATE,
            keeps_peak=True,
        ),
        ways=("sync-once",),
    ),
    Change("smaller-batch", "Use a smaller batch and accumulate gradients over several passes"),
    Change("sharding", "Shard optimizer state, gradients and parameters with fully_shard (FSDP)"),
    Change(
        "steady-shapes",
        "Use the same shapes in every step: pad to a few lengths, drop the last partial batch",
    ),
    Change(
        "detach", "Store loss.item() or loss.detach(), not the loss: it keeps its whole graph alive"
    ),
    Change(
        "snapshot",
        "Call torch.cuda.memory._dump_snapshot() after some steps and run `stepscope explain`"
        " on the file: it names the lines that allocate",
    ),
    Change(
        "tracemalloc",
        "Compare two snapshots of tracemalloc, 1,000 steps apart: they name the lines that "
        "allocate",
    ),
)
