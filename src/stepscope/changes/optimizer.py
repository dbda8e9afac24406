"""The optimizer's update."""

from __future__ import annotations

from stepscope.changes.change import Application, ApplyStage, Change, Code, Effect, WhatIf

CHANGES = (
    Change(
        "optimizer",
        prediction=WhatIf(
            Code("predict.whatifs.optimizer:predict"),
            help="create the optimizer as foreach or fused",
            label="a {} optimizer",
            stage=ApplyStage.OPTIMIZER,
            usual=("fused",),
            joins_peak=True,
        ),
    ),
    Change(
        "fused-optimizer",
        "Pass fused=True to the optimizer",
        application=Application(
            Code("fix.remedies.optimizer:FUSED_OPTIMIZER"),
            Effect.ROUNDING,
            family="optimizer",
        ),
        setting="optimizer=fused",
    ),
    Change(
        "foreach-optimizer",
        "Pass foreach=True to the optimizer: one call updates all parameters",
        application=Application(
            Code("fix.remedies.optimizer:FOREACH_OPTIMIZER"),
            Effect.ROUNDING,
            family="optimizer",
        ),
        setting="optimizer=foreach",
    ),
    Change(
        "set-to-none",
        "Call zero_grad(set_to_none=True): gradients are written, not added to zeros",
        application=Application(Code("fix.remedies.optimizer:SET_TO_NONE"), Effect.BIT_IDENTICAL),
    ),
)
