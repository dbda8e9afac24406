"""Processes that prepare batches while the training computes: num_workers of the DataLoader.

Workers have random numbers of their own: a dataset that draws some gets others than before. One
that draws none gives the same batches in the same order.
"""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.loaders import NO_LOADER, patch_loaders, set_in_loaders, training_loaders
from stepscope.fix.machine_facts import share_of_cores

if TYPE_CHECKING:
    from stepscope.fix.building import Made
    from stepscope.fix.proposal import Proposal, Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts

_ALL_OF_IT = "the dataset only yields (IterableDataset): every worker would yield all of it"


def fits(facts: ScriptFacts, value: str) -> str | None:
    loaders = training_loaders(facts)
    if not loaders:
        return NO_LOADER
    cores = share_of_cores(facts.cores, facts.machine_cores, facts.local_ranks)
    if int(value) > cores:
        return f"a rank has {cores} cores here"
    able = [built for built in loaders if not built.iterable]
    if not able:
        return _ALL_OF_IT
    if all(built.options.get("num_workers") == int(value) for built in able):
        return f"the DataLoader has {value} workers already"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    set_in_loaders(training, "num_workers", int(value), _why_not)


def _why_not(made: Made) -> str | None:
    from torch.utils.data import IterableDataset

    dataset = made.value("dataset")
    if isinstance(dataset, IterableDataset):
        return _ALL_OF_IT
    if any(tensor.is_cuda for tensor in getattr(dataset, "tensors", ())):
        return "the dataset is on the GPU already, where workers cannot reach it"
    if multiprocessing.current_process().daemon:
        return "this process may not start others (it is a daemon)"
    return None


def patch(script: Script, value: str) -> Proposal:
    return patch_loaders(script, "num_workers", value, lambda built: not built.iterable)


FIX = Fix(
    id="loader-workers",
    effect=Effect.RANDOM,
    may_be=Effect.BIT_IDENTICAL,
    values=("2", "4", "8", "1"),
    accepts=lambda value: value.isdecimal() and int(value) > 0,
    fits=fits,
    apply=apply,
    patch=patch,
)
