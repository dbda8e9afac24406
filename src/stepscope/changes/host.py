"""The host: its threads and cores, its allocators, garbage collection, and what it waits for."""

from __future__ import annotations

from stepscope.changes.change import Application, ApplyStage, Change, Code, Effect, WhatIf


def _label_threads(value: str) -> str:
    if value == "fit":
        return "one thread per free core"
    return "one thread" if value == "1" else f"{value} threads" if value else "threads"


def _label_no_stalls(value: str) -> str:
    causes = " and ".join(
        name.strip().replace("-", " ").replace("_", " ") for name in value.split(",")
    )
    return f"no {causes} stalls" if value else "no stalls"


CHANGES = (
    Change(
        "threads",
        "Set OMP_NUM_THREADS to the number of free cores per rank",
        prediction=WhatIf(
            Code("predict.whatifs.threads:predict"),
            help="N threads for a CPU step (fit: one per free core)",
            label=_label_threads,
            stage=ApplyStage.THREADS,
            keeps_peak=True,
        ),
        application=Application(
            Code("fix.remedies.cores:THREADS"),
            Effect.ROUNDING,
            values=("cores", "half"),
            family="threads",
        ),
        setting="threads=fit",
    ),
    Change(
        "one-thread",
        "Set OMP_NUM_THREADS=1: no operator here is long enough to share",
        application=Application(
            Code("fix.remedies.cores:ONE_THREAD"), Effect.ROUNDING, family="threads"
        ),
        setting="threads=1",
    ),
    Change(
        "pin-ranks",
        "Give each rank cores of its own with taskset -c",
        application=Application(Code("fix.remedies.cores:PIN_RANKS"), Effect.ROUNDING),
    ),
    Change(
        "cpu-allocator",
        "Load tcmalloc or jemalloc with LD_PRELOAD: CPU memory is then allocated and freed faster",
        application=Application(
            Code("fix.remedies.host:CPU_ALLOCATOR"),
            Effect.BIT_IDENTICAL,
            values=("tcmalloc", "jemalloc"),
        ),
    ),
    Change(
        "flush-denormal",
        "Call torch.set_flush_denormal(True) before training: denormal values become 0",
        application=Application(Code("fix.remedies.host:FLUSH_DENORMAL"), Effect.ROUNDING),
    ),
    Change(
        "onednn",
        "Set torch.backends.mkldnn.enabled = True",
        application=Application(Code("fix.remedies.host:ONEDNN"), Effect.ROUNDING),
    ),
    Change(
        "vectors",
        "Unset ATEN_CPU_CAPABILITY: torch then uses the widest vectors",
        application=Application(Code("fix.remedies.host:VECTORS"), Effect.ROUNDING),
    ),
    Change(
        "expandable-segments",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: segments grow instead of "
        "leaving holes",
        application=Application(
            Code("fix.remedies.host:EXPANDABLE_SEGMENTS"), Effect.BIT_IDENTICAL
        ),
    ),
    Change(
        "gc-freeze",
        "Call gc.freeze() once model and data are built: collections then skip those objects",
        application=Application(Code("fix.remedies.host:GC_FREEZE"), Effect.BIT_IDENTICAL),
        predicted_as=("no-stalls=gc",),
    ),
    Change(
        "gc-by-hand",
        "Call gc.disable(), and gc.collect() every N steps, on all ranks at the same step",
        predicted_as=("no-stalls=gc",),
        ways=("gc-freeze",),
    ),
    Change(
        "no-stalls",
        prediction=WhatIf(
            Code("predict.whatifs.waits:predict_no_stalls"),
            help="every step is a typical one (no-stalls=data,gc removes only stalls of these "
            "causes)",
            label=_label_no_stalls,
            stage=ApplyStage.STOP_WAITING,
            value_is_optional=True,
            usual=("",),
            needs_every_step=True,
            is_goal=True,
            keeps_peak=True,
            needs_ceilings=False,
        ),
    ),
    Change(
        "no-sync",
        "Move .item(), .cpu() and print() of tensors out of the step, or call them every N "
        "steps. Copy with non_blocking=True",
        prediction=WhatIf(
            Code("predict.whatifs.waits:predict_no_sync"),
            help="without calls that wait for the GPU (.item(), .cpu(), synchronize)",
            label="no blocking calls",
            stage=ApplyStage.STOP_WAITING,
            takes_value=False,
            usual=("",),
            is_goal=True,
            keeps_peak=True,
            needs_ceilings=False,
        ),
        application=Application(
            Code("fix.remedies.blocking_reads:NO_SYNC"), Effect.BIT_IDENTICAL, patch_only=True
        ),
        predicted_as=("no-sync",),
    ),
    Change(
        "own-python",
        "Spend less time outside the model: turn loops over samples into tensor operators, "
        "and keep lists out of the step",
    ),
    Change("fewer-ranks", "Start no more ranks than there are cores"),
    Change("idle-machine", "Stop the other programs, or keep them off these cores (taskset, nice)"),
    Change(
        "wait-elsewhere",
        "Find what the training thread waits for (a queue, a lock, a socket, time.sleep), and"
        " let another thread or DataLoader workers wait for it ahead of time",
    ),
    Change("look-at-line", "Look at the line that takes longer than before"),
)
