"""The precision of matmuls and convolutions."""

from __future__ import annotations

from stepscope.changes.change import Application, ApplyStage, Change, Code, Effect, WhatIf

CHANGES = (
    Change(
        "precision",
        prediction=WhatIf(
            Code("predict.whatifs.precision:predict"),
            help="matmuls in tf32, bf16, fp16 (autocast) or fp8",
            label="{}",
            stage=ApplyStage.PRECISION,
            usual=("tf32", "bf16"),
            joins_peak=True,
        ),
    ),
    Change(
        "tf32",
        'Call torch.set_float32_matmul_precision("high"): tensors stay fp32, matmuls use TF32',
        application=Application(
            Code("fix.remedies.precision:TF32"), Effect.ROUNDING, family="precision"
        ),
        setting="precision=tf32",
    ),
    Change(
        "bf16",
        "Run forward and loss under bf16 autocast",
        application=Application(
            Code("fix.remedies.precision:BF16"),
            Effect.RANDOM,  # dropout's kernels of 16 bits draw others
            may_be=Effect.ROUNDING,
            family="precision",
            # The host, which autocast costs more, then no longer sets the pace.
            after=frozenset({"compile"}),
        ),
        setting="precision=bf16",
    ),
    Change(
        "fp16",
        'Run forward and loss under torch.autocast("cuda", dtype=torch.float16), with a GradScaler',
        application=Application(
            Code("fix.remedies.precision:FP16"),
            Effect.RANDOM,  # dropout's kernels of 16 bits draw others
            may_be=Effect.ROUNDING,
            family="precision",
            # The host, which autocast costs more, then no longer sets the pace.
            after=frozenset({"compile"}),
        ),
        setting="precision=fp16",
    ),
)
