"""Fewer, larger or better kernels: the compiler, CUDA graphs, layouts, another GPU."""

from __future__ import annotations

from stepscope.changes.change import Application, ApplyStage, Change, Code, Effect, WhatIf


def _label_compile(value: str) -> str:
    return f"compile ({value})" if value else "torch.compile"


def _label_gpu(value: str) -> str:
    return f"on {value}" if value else "another GPU"


CHANGES = (
    Change(
        "channels-last",
        "Convert model and inputs to torch.channels_last",
        application=Application(
            Code("fix.remedies.kernels:CHANNELS_LAST"),
            Effect.ROUNDING,
            after=frozenset({"precision"}),
        ),
    ),
    Change(
        "cudnn-benchmark",
        "Set torch.backends.cudnn.benchmark = True: cuDNN tries its algorithms",
        application=Application(
            Code("fix.remedies.kernels:CUDNN_BENCHMARK"),
            Effect.ROUNDING,
            after=frozenset({"channels-last", "precision"}),
        ),
    ),
    Change(
        "compile",
        "Call torch.compile(model): it fuses operators and launches fewer kernels",
        prediction=WhatIf(
            Code("predict.whatifs.compile:predict"),
            help="torch.compile: fuse neighboring operators; reduce-overhead also launches them as "
            "CUDA graphs",
            label=_label_compile,
            stage=ApplyStage.FUSE,
            value_is_optional=True,
            usual=("",),
            joins_peak=True,
        ),
        application=Application(
            Code("fix.remedies.kernels:COMPILE"),
            Effect.RANDOM,  # it draws the random numbers of dropout in its own way
            may_be=Effect.ROUNDING,
            values=("default", "reduce-overhead", "max-autotune-no-cudagraphs"),
            family="compile",
            after=frozenset({"precision"}),
        ),
        predicted_as=("compile",),
    ),
    Change(
        "reduce-overhead",
        'Call torch.compile(model, mode="reduce-overhead"): each of its graphs becomes one launch',
        predicted_as=("compile=reduce-overhead",),
    ),
    Change(
        "no-breaks",
        "Rewrite the line so that torch.compile can trace it, or move it out of the compiled "
        "function",
        prediction=WhatIf(
            Code("predict.whatifs.waits:predict_no_breaks"),
            help="without graph breaks: torch.compile makes one graph where lines of code split it"
            " now",
            label="no graph breaks",
            stage=ApplyStage.STOP_WAITING,
            takes_value=False,
            usual=("",),
            keeps_peak=True,
            needs_ceilings=False,
        ),
        predicted_as=("no-breaks",),
    ),
    Change(
        "mark-dynamic",
        "Mark the dimension that changes with torch._dynamo.mark_dynamic, or pass "
        "dynamic=True to torch.compile: one graph then fits all sizes",
        predicted_as=("no-stalls=compile",),
    ),
    Change(
        "steady-values",
        "Pass the value that changes as a tensor, or keep it out of the compiled function: a "
        "plain Python value is part of the graph",
    ),
    Change(
        "keep-compile-cache",
        "Set TORCHINDUCTOR_CACHE_DIR to a folder that outlives the job: later runs compile less",
    ),
    Change(
        "compile-blocks",
        "Compile the block that repeats with block.compile(), not the whole model: one "
        "compilation serves all of them",
    ),
    Change(
        "fuse-neighbours",
        'Try mode="max-autotune", or make the operators beside each other fusible: the same '
        "shapes, reductions over the same dimension, no in-place update or view in between",
    ),
    Change(
        "graphable",
        "Remove what keeps the graph from being replayed: inputs that are written to, work on"
        " the CPU",
    ),
    Change(
        "cuda-graphs",
        "Capture the step with torch.cuda.graph() and replay it: one launch per step",
        prediction=WhatIf(
            Code("predict.whatifs.cuda_graphs:predict"),
            help="launch the whole step as one CUDA graph",
            label="CUDA graphs",
            stage=ApplyStage.LAUNCH_ONCE,
            takes_value=False,
            usual=("",),
            needs_ceilings=False,
        ),
        predicted_as=("cuda-graphs",),
        ways=("compile",),
    ),
    Change(
        "gpu",
        prediction=WhatIf(
            Code("predict.other_gpu.step:predict_gpu"),
            help="another GPU, by name (gpu=H100) or by a file that describes it",
            label=_label_gpu,
            stage=ApplyStage.GPU,
            keeps_peak=True,
            needs_ceilings=False,
        ),
    ),
    Change(
        "remove",
        prediction=WhatIf(
            Code("predict.whatifs.by_name:predict_without"),
            help="without kernels and operators whose name matches (remove=REGEX)",
            label="no {}",
            stage=ApplyStage.REMOVE,
            repeatable=True,
            needs_ceilings=False,
        ),
    ),
    Change(
        "scale",
        prediction=WhatIf(
            Code("predict.whatifs.by_name:predict_scaled"),
            help="kernels, or else CPU events, whose name matches take FACTOR times as long",
            label="scaling {}",
            stage=ApplyStage.SCALE,
            repeatable=True,
            needs_ceilings=False,
        ),
    ),
)
