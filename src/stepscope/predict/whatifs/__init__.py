"""What can be changed: the table of what-ifs, in the order in which they are listed and tried.

A file of this folder is imported when one of its changes is first predicted. Its `apply(context,
value)` gives an Outcome. It raises Refused if there is nothing to change or the trace does not
hold enough to tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib import import_module
from typing import Any

from stepscope.errors import UsageError
from stepscope.predict.declaration import ApplyStage, WhatIf, describe_factor, parse_whole
from stepscope.records.change_values import read_target
from stepscope.records.prediction import Setting
from stepscope.records.remedies import REMEDIES, WHATIF_OF, did_you_mean
from stepscope.text.words import counted, plural


def _in_file(file: str, function: str = "apply") -> partial[Any]:
    """Return a function of one of these files, which is imported when the function is called."""
    return partial(_call, file, function)


def _call(file: str, function: str, *arguments: Any) -> Any:
    return getattr(import_module(f"{__name__}.{file}"), function)(*arguments)


def _label_compile(value: str) -> str:
    return f"compile ({value})" if value else "torch.compile"


def _label_threads(value: str) -> str:
    if value == "fit":
        return "one thread per free core"
    return "one thread" if value == "1" else f"{value} threads" if value else "threads"


def _label_loader_workers(value: str) -> str:
    if value == "0":
        return "no loader workers"
    return f"{counted(int(value), 'loader worker')}" if value.isdecimal() else "loader workers"


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


def _label_workers(value: str) -> str:
    count = value.partition(":")[0]
    shared = " (sharing the batch)" if _shares_batch(value) else ""
    return f"{count} {plural(parse_whole(count), 'worker')}{shared}"


def _shares_batch(value: str) -> bool:
    return value.endswith(":strong")


def _label_consistency(value: str) -> str:
    return f"a parameter server with {value} consistency"


def _label_gpu(value: str) -> str:
    return f"on {value}" if value else "another GPU"


_TABLE = (
    WhatIf(
        name="precision",
        help="matmuls in tf32, bf16, fp16 (autocast) or fp8",
        label="{}",
        stage=ApplyStage.PRECISION,
        apply=_in_file("precision"),
        usual=("tf32", "bf16"),
        joins_peak=True,
    ),
    WhatIf(
        name="optimizer",
        help="create the optimizer as foreach or fused",
        label="a {} optimizer",
        stage=ApplyStage.OPTIMIZER,
        apply=_in_file("optimizer"),
        usual=("fused",),
        joins_peak=True,
    ),
    WhatIf(
        name="compile",
        help=(
            "torch.compile: fuse neighboring operators; reduce-overhead also launches them as CUDA "
            "graphs"
        ),
        label=_label_compile,
        stage=ApplyStage.FUSE,
        apply=_in_file("compile"),
        value_is_optional=True,
        usual=("",),
        joins_peak=True,
        remedies={"compile": ("",), "reduce-overhead": ("reduce-overhead",)},
    ),
    WhatIf(
        name="cuda-graphs",
        help="launch the whole step as one CUDA graph",
        label="CUDA graphs",
        stage=ApplyStage.LAUNCH_ONCE,
        apply=_in_file("cuda_graphs"),
        takes_value=False,
        usual=("",),
        needs_ceilings=False,
        remedies={"cuda-graphs": ("",)},
    ),
    WhatIf(
        name="threads",
        help="N threads for a CPU step (fit: one per free core)",
        label=_label_threads,
        stage=ApplyStage.THREADS,
        apply=_in_file("threads"),
        keeps_peak=True,
    ),
    WhatIf(
        name="no-breaks",
        help="without graph breaks: torch.compile makes one graph where lines of code split it now",
        label="no graph breaks",
        stage=ApplyStage.STOP_WAITING,
        apply=_in_file("no_breaks"),
        takes_value=False,
        usual=("",),
        keeps_peak=True,
        needs_ceilings=False,
        remedies={"no-breaks": ("",)},
    ),
    WhatIf(
        name="no-sync",
        help="without calls that wait for the GPU (.item(), .cpu(), synchronize)",
        label="no blocking calls",
        stage=ApplyStage.STOP_WAITING,
        apply=_in_file("no_sync"),
        takes_value=False,
        usual=("",),
        is_goal=True,
        keeps_peak=True,
        needs_ceilings=False,
        remedies={"no-sync": ("",)},
    ),
    WhatIf(
        name="no-data-wait",
        help="every batch is ready when the step needs it",
        label="every batch ready in time",
        stage=ApplyStage.STOP_WAITING,
        apply=_in_file("no_data_wait"),
        takes_value=False,
        usual=("",),
        is_goal=True,
        keeps_peak=True,
        needs_ceilings=False,
        remedies={"no-data-wait": ("",)},
    ),
    WhatIf(
        name="loader-workers",
        help="N worker processes of the DataLoader (0: the training thread makes its batches)",
        label=_label_loader_workers,
        stage=ApplyStage.STOP_WAITING,
        apply=_in_file("loader_workers"),
        keeps_peak=True,
        needs_ceilings=False,
        remedies={"loader-workers": ("0", "1", "2", "4")},
    ),
    WhatIf(
        name="no-stalls",
        help="every step is a typical one (no-stalls=data,gc removes only stalls of these causes)",
        label=_in_file("no_stalls", "label"),
        stage=ApplyStage.STOP_WAITING,
        apply=_in_file("no_stalls"),
        value_is_optional=True,
        usual=("",),
        needs_every_step=True,
        is_goal=True,
        keeps_peak=True,
        needs_ceilings=False,
        remedies={
            "gc-freeze": ("gc",),
            "gc-by-hand": ("gc",),
            "mark-dynamic": ("compile",),
            "async-checkpoint": ("checkpoint",),
        },
    ),
    WhatIf(
        name="scan",
        help="backward through recurrent layers in chunks that run at the same time",
        label="scan backward",
        stage=ApplyStage.SCALE,
        apply=_in_file("scan"),
        takes_value=False,
        keeps_peak=True,
        needs_ceilings=False,
    ),
    WhatIf(
        name="batch",
        help="another batch size, as a number or a factor (x2)",
        label=_label_batch,
        stage=ApplyStage.BATCH,
        apply=_in_file("batch"),
        usual=("x2",),
        joins_peak=True,
        remedies={"batch": ("x2",)},
    ),
    WhatIf(
        name="fuse",
        help="train N models of one architecture together, for N times the samples (fuse=8)",
        label="{} models trained together",
        stage=ApplyStage.BATCH,
        apply=_in_file("fuse"),
        remedies={"fuse": ("8", "16", "32")},
    ),
    WhatIf(
        name="accumulate",
        help="N micro-batches per optimizer step (accumulate=4)",
        label="{} micro-batches per step",
        stage=ApplyStage.ACCUMULATE,
        apply=_in_file("accumulate"),
        keeps_peak=True,
    ),
    WhatIf(
        name="checkpoint",
        help="recompute blocks in backward (blocks), or stop doing so (none)",
        label=_label_checkpoint,
        stage=ApplyStage.RECOMPUTE,
        apply=_in_file("checkpoint"),
        usual=("none", "blocks"),
        saves_memory=("blocks",),
        joins_peak=True,
        remedies={"no-checkpoint": ("none",)},
    ),
    WhatIf(
        name="save-memory",
        help=(
            "save less for backward: within 5%, half (0.5), a budget (12GB), for 2x the batch, or "
            "max"
        ),
        label=_label_save_memory,
        stage=ApplyStage.RECOMPUTE,
        apply=_in_file("save_memory"),
        usual=("5%",),
        saves_memory=("5%",),
    ),
    WhatIf(
        name="workers",
        help=(
            "N data-parallel workers, each with its own batch (workers=8; 8:strong divides one "
            "batch)"
        ),
        label=_label_workers,
        stage=ApplyStage.WORKERS,
        apply=_in_file("more_workers", "apply_workers"),
        keeps_peak=True,
        shares_batch=_shares_batch,
    ),
    WhatIf(
        name="hosts",
        help=(
            "N hosts, each with its ranks and batches (hosts=8; hosts=8:10GB/s:20us states the "
            "link)"
        ),
        label=_in_file("more_workers", "label_hosts"),
        stage=ApplyStage.WORKERS,
        apply=_in_file("more_workers", "apply_hosts"),
        keeps_peak=True,
    ),
    WhatIf(
        name="zero",
        help="shard optimizer state (1), also gradients (2), also parameters (3) over the workers",
        label="ZeRO stage {}",
        stage=ApplyStage.SHARD,
        apply=_in_file("zero"),
    ),
    WhatIf(
        name="bucket-mb",
        help="DDP's bucket_cap_mb: exchange gradients in buckets of N MiB (bucket-mb=25)",
        label="DDP buckets of {} MiB",
        stage=ApplyStage.BUCKETS,
        apply=_in_file("bucket_mb"),
        keeps_peak=True,
        remedies={"bucket-mb": ("5", "100")},
    ),
    WhatIf(
        name="bandwidth",
        help="links with N times the bandwidth (bandwidth=2)",
        label=lambda value: f"{describe_factor(value)} the bandwidth",
        stage=ApplyStage.LINKS,
        apply=_in_file("links", "apply_bandwidth"),
        usual=("2",),
        for_several_ranks=True,
        is_goal=True,
        keeps_peak=True,
        # bf16 gradients are half the bytes of fp32 ones.
        remedies={"bandwidth": ("2",), "compress-gradients": ("2",)},
    ),
    WhatIf(
        name="latency",
        help="collectives with N times the latency (latency=0.5)",
        label=lambda value: f"{describe_factor(value)} the latency",
        stage=ApplyStage.LINKS,
        apply=_in_file("links", "apply_latency"),
        keeps_peak=True,
    ),
    WhatIf(
        name="no-straggler",
        help="the slowest rank takes as long as the median rank",
        label="no slow rank",
        stage=ApplyStage.BALANCE,
        apply=_in_file("no_straggler"),
        takes_value=False,
        usual=("",),
        for_several_ranks=True,
        is_goal=True,
        keeps_peak=True,
        needs_ceilings=False,
        remedies={"no-straggler": ("",)},
    ),
    WhatIf(
        name="consistency",
        help="train through a parameter server (strong, bounded:3, eventual or weak:4)",
        label=_label_consistency,
        stage=ApplyStage.BALANCE,
        apply=_in_file("consistency"),
        for_several_ranks=True,
        keeps_peak=True,
        needs_ceilings=False,
        remedies={"bounded-staleness": ("bounded:3",), "no-barrier": ("eventual",)},
    ),
    WhatIf(
        name="gpu",
        help="another GPU, by name (gpu=H100) or by a file that describes it",
        label=_label_gpu,
        stage=ApplyStage.GPU,
        apply=_in_file("gpu"),
        keeps_peak=True,
        needs_ceilings=False,
    ),
    WhatIf(
        name="remove",
        help="without kernels and operators whose name matches (remove=REGEX)",
        label="no {}",
        stage=ApplyStage.REMOVE,
        apply=_in_file("by_name", "remove"),
        repeatable=True,
        needs_ceilings=False,
    ),
    WhatIf(
        name="scale",
        help="kernels, or else CPU events, whose name matches take FACTOR times as long",
        label="scaling {}",
        stage=ApplyStage.SCALE,
        apply=_in_file("by_name", "scale"),
        repeatable=True,
        needs_ceilings=False,
    ),
)
WHATIFS = {whatif.name: whatif for whatif in _TABLE}


def find_whatif(name: str) -> WhatIf:
    """Return the declaration, or raise UsageError for a name that nothing has."""
    if name in WHATIFS:
        return WHATIFS[name]
    if name in REMEDIES and name not in remedy_ids():
        raise UsageError(
            f"stepscope cannot predict the change {name!r}. `stepscope tune --only {name}` "
            "measures it if stepscope can apply it, and `stepscope ab` compares two versions"
        )
    hint = did_you_mean(name, [*WHATIFS, *sorted(remedy_ids())])
    raise UsageError(f"there is no change {name!r} to predict{hint or '. ' + _known()}")


def _known() -> str:
    return f"There are {', '.join(sorted(WHATIFS))}"


def parse_setting(text: str) -> Setting:
    """Read NAME or NAME=VALUE of a what-if, or the same change as `run --with` spells it."""
    setting = Setting.parse(text)
    if str(setting) in WHATIF_OF and not text.strip().endswith("="):
        return Setting.parse(WHATIF_OF[str(setting)])
    stands_for = () if setting.name in WHATIFS else settings_for_remedy(setting.name)
    takes_value = not stands_for and find_whatif(setting.name).takes_value
    if setting.value and not takes_value:
        raise UsageError(f"{setting}: {setting.name} takes no value. Write --set {setting.name}")
    return stands_for[0] if stands_for else setting


def in_order(settings: Iterable[Setting]) -> list[Setting]:
    """The order in which changes are made: by stage, then by name and value."""
    return sorted(
        settings, key=lambda setting: (find_whatif(setting.name).stage, setting.name, setting.value)
    )


def remedy_ids() -> set[str]:
    """Return the changes, as findings and fixes name them, that a what-if can predict."""
    fixes = {fix for fix in WHATIF_OF if "=" not in fix}
    return fixes | {remedy for whatif in WHATIFS.values() for remedy in whatif.remedies}


def settings_for_remedy(remedy: str) -> tuple[Setting, ...]:
    """Return what predicts a change of findings and fixes: the best one counts. May be none."""
    declared = tuple(
        Setting(name=whatif.name, value=value)
        for whatif in WHATIFS.values()
        for value in whatif.remedies.get(remedy, ())
    )
    if declared or remedy not in WHATIF_OF:
        return declared
    return (Setting.parse(WHATIF_OF[remedy]),)
