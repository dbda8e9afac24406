"""How batches are made and reach the device."""

from __future__ import annotations

from stepscope.changes.change import Application, ApplyStage, Change, Code, Effect, WhatIf
from stepscope.text.words import counted


def _label_workers(value: str) -> str:
    if value == "0":
        return "no loader workers"
    return f"{counted(int(value), 'loader worker')}" if value.isdecimal() else "loader workers"


CHANGES = (
    Change(
        "loader-workers",
        "Set num_workers of the DataLoader",
        prediction=WhatIf(
            Code("predict.whatifs.loader_workers:predict"),
            help="N worker processes of the DataLoader (0: the training thread makes its batches)",
            label=_label_workers,
            stage=ApplyStage.STOP_WAITING,
            keeps_peak=True,
            needs_ceilings=False,
        ),
        application=Application(
            Code("fix.remedies.loader:LOADER_WORKERS"),
            Effect.RANDOM,
            may_be=Effect.BIT_IDENTICAL,
            values=("2", "4", "8", "1", "0"),
        ),
        setting="loader-workers=2",
        predicted_as=(
            "loader-workers=0",
            "loader-workers=1",
            "loader-workers=2",
            "loader-workers=4",
        ),
    ),
    Change(
        "persistent-workers",
        "Set persistent_workers=True: the DataLoader's workers then outlive an epoch",
        application=Application(
            Code("fix.remedies.loader:PERSISTENT_WORKERS"),
            Effect.RANDOM,
            may_be=Effect.BIT_IDENTICAL,
            after=frozenset({"loader-workers"}),
        ),
    ),
    Change(
        "prefetch-factor",
        "Raise prefetch_factor of the DataLoader: every worker then loads more batches ahead",
        application=Application(
            Code("fix.remedies.loader:PREFETCH_FACTOR"),
            Effect.BIT_IDENTICAL,
            values=("4", "8"),
            after=frozenset({"loader-workers"}),
        ),
    ),
    Change(
        "pin-memory",
        "Set pin_memory=True in the DataLoader, and copy with non_blocking=True",
        application=Application(Code("fix.remedies.loader:PIN_MEMORY"), Effect.BIT_IDENTICAL),
    ),
    Change(
        "prefetch",
        "Copy the next batch on a side stream while the step computes",
        ways=("pin-memory",),
    ),
    Change(
        "no-data-wait",
        "Try more DataLoader workers (num_workers) and a longer prefetch (prefetch_factor)",
        prediction=WhatIf(
            Code("predict.whatifs.waits:predict_no_data_wait"),
            help="every batch is ready when the step needs it",
            label="every batch ready in time",
            stage=ApplyStage.STOP_WAITING,
            takes_value=False,
            usual=("",),
            is_goal=True,
            keeps_peak=True,
            needs_ceilings=False,
        ),
        predicted_as=("no-data-wait",),
        ways=("loader-workers", "prefetch-factor"),
    ),
    Change("cheaper-batch", "Make a batch cheaper to load: decode less, store what is prepared"),
    Change("check-storage", "Check whether this host reads from slower storage"),
)
