"""Work beside the steps, and what to record to know more."""

from __future__ import annotations

from stepscope.changes.change import Change

CHANGES = (
    Change(
        "evaluate-less",
        "Evaluate less often, on fewer batches or with larger ones, under torch.inference_mode()",
    ),
    Change(
        "more-environments",
        (
            "Step several environments at once under torch.inference_mode(), so that one forward "
            "pass acts for all of them"
        ),
    ),
    Change(
        "generate-less",
        (
            "Generate less often, fewer samples or larger batches of them, under "
            "torch.inference_mode()"
        ),
    ),
    Change(
        "inference-mode",
        (
            "Run passes without gradients under torch.inference_mode(), on larger batches or less"
            " often"
        ),
    ),
    Change(
        "async-checkpoint",
        (
            "Save with torch.distributed.checkpoint.async_save: training goes on while files are "
            "written"
        ),
        predicted_as=("no-stalls=checkpoint",),
    ),
    Change(
        "fast-start", "Import less, prepare data once and store it, create the model on its device"
    ),
    Change(
        "on-stall",
        "Record with `stepscope run --on-stall`: the profiler then opens at the next such stall",
    ),
    Change(
        "late-window",
        (
            "Record windows over the whole run (`stepscope run --every N`) and compare a late one"
            " with an early one"
        ),
    ),
    Change("calibrate", "Run `stepscope calibrate` on the idle machine"),
    Change("stepscope-run", "Record the training with `stepscope run -- python train.py`"),
    Change("lighter-profile", "Record fewer steps, or leave out shapes and stacks"),
)
