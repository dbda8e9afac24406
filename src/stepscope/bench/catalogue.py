"""Every workload there is: the suite's files, extra ones, and what other packages declare."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from stepscope.bench import workloads
from stepscope.bench.workload import SIZES, TrainingWorkload
from stepscope.errors import UsageError
from stepscope.text.words import counted

# Where each workload is: a module of workloads/, imported when the workload is asked for.
SUITE = {
    "actor-critic": "reinforcement_learning", "bert-large": "sequence_models",
    "bert-medium": "sequence_models", "dcgan": "gans", "deep-speech-2": "audio",
    "diffusion-unet": "image_generators", "dlrm": "tabular", "efficientdet": "object_detection",
    "gat": "graphs_and_points", "gpt2": "language_models", "inception-v3": "lean_image_classifiers",
    "long-rnn": "sequence_models", "mask-rcnn": "instance_segmentation",
    "minigo": "reinforcement_learning", "mobilenet-v3-large": "lean_image_classifiers",
    "moe": "language_models", "ncf": "tabular", "nmt-lstm": "sequence_models",
    "pointnet-cls": "graphs_and_points", "pointnet-seg": "graphs_and_points",
    "resnet50": "image_classifiers", "transformer": "sequence_models",
    "vgg16": "image_classifiers", "wgan-gp": "gans",
}  # fmt: skip
EXTRA = {  # beside the suite: run when they are named
    "c3d": "image_classifiers", "conformer": "audio", "convnext": "patch_classifiers",
    "densenet121": "image_classifiers", "linear-attention": "language_models",
    "llama": "language_models", "mlp-mixer": "patch_classifiers", "swin": "patch_classifiers",
    "tabular": "tabular", "vae": "image_generators", "wavenet": "audio",
}  # fmt: skip
GROUP = "stepscope.workloads"  # entry points of other packages: NAME = "package.module:WORKLOAD"


def names() -> tuple[str, ...]:
    """In order: the suite, our own outside it, other packages'; nothing is imported for it."""
    return (*sorted(SUITE), *sorted(EXTRA), *sorted(_others()))


def load(name: str) -> TrainingWorkload:
    """UsageError for a name that nobody has, or a package that cannot be used."""
    if name in _own():
        module = importlib.import_module(f"{workloads.__name__}.{_own()[name]}")
        workload: TrainingWorkload = getattr(module, f"{name.upper().replace('-', '_')}_WORKLOAD")
        return workload
    entries = _others().get(name)
    if entries is None:
        raise UsageError(f"there is no workload {name}{_nearest(name, names())}")
    if len(entries) > 1:
        packages = " and ".join(sorted(map(_package, entries)))
        raise UsageError(
            f"{counted(len(entries), 'package')} have a workload {name}: {packages}. Remove "
            "all but one, or rename theirs"
        )
    return _load_entry(entries[0])


def problems() -> tuple[str, ...]:
    """Names that other packages declare and nobody can run, in words; nothing is imported."""
    own = _own()
    taken = (entry for entry in entry_points(group=GROUP) if entry.name in own)
    return tuple(
        f"{_package(entry)} declares a workload {entry.name}, which is also one of the "
        "suite's. The suite's is run"
        for entry in taken
    )


def _load_entry(entry: EntryPoint) -> TrainingWorkload:
    where = f"workload {entry.name} of {_package(entry)} ({entry.value})"
    try:
        workload = entry.load()
    except Exception as error:
        raise UsageError(
            f"{where} cannot be loaded: {type(error).__name__}: {error}. Repair or remove the "
            "package"
        ) from None
    if not isinstance(workload, TrainingWorkload):
        raise UsageError(f"{where} is not a stepscope.bench.workload.TrainingWorkload")
    if (fault := _fault(entry.name, workload)) is not None:
        raise UsageError(f"{where}: {fault}")
    return workload


def _fault(name: str, workload: TrainingWorkload) -> str | None:
    """What would break later, in the middle of a bench."""
    if workload.name != name:
        return f"it calls itself {workload.name}, but the entry point must have the same name"
    if not workload.sizes or not workload.sizes.keys() <= {*SIZES}:
        return (
            f"its sizes are {', '.join(workload.sizes) or 'none'}. Possible sizes are "
            f"{', '.join(SIZES)}"
        )
    for size, settings in workload.sizes.items():
        if "batch" not in settings:
            return f"size {size} has no batch"
        if size not in workload.targets:
            return f"size {size} has no target"
    return None


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist is not None else "a package without a name"


def _own() -> dict[str, str]:
    return {**SUITE, **EXTRA}


def _others() -> dict[str, list[EntryPoint]]:
    """What other packages declare, without the suite's own names."""
    own = _own()
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        if entry.name not in own:
            found.setdefault(entry.name, []).append(entry)
    return found


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, 3, 0.5)
    return f": did you mean {' or '.join(close)}?" if close else f". There are: {', '.join(known)}"
