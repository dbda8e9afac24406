"""Processes that prepare batches while the training computes: num_workers of the DataLoader.

None (0) is a value, too: small batches take longer to hand over than to make.

Workers have random numbers of their own: a dataset that draws some gets others than before. One
that draws none gives the same batches in the same order.
"""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import TYPE_CHECKING

from stepscope.fix.cores import share_of_cores
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.remedies.loader.data_loaders import (
    NO_LOADER,
    patch_loaders,
    set_in_loaders,
    training_loaders,
)
from stepscope.records.script_facts import Built, ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess

_PER_CORE = 2  # workers that wait for files or a network leave cores free
# The DataLoader's arguments that mean nothing, or raise, without workers.
_OF_WORKERS = (
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "timeout",
    "worker_init_fn",
)
_ALL_OF_IT = "the dataset is an IterableDataset, so every worker would yield all of it"


def fits(facts: ScriptFacts, value: str) -> str | None:
    loaders = training_loaders(facts)
    if not loaders:
        return NO_LOADER
    cores = share_of_cores(facts.cores, facts.machine_cores, facts.local_ranks)
    if int(value) > _PER_CORE * cores:
        return f"a rank has {cores} cores here"
    able = [built for built in loaders if int(value) < 2 or not built.iterable]
    if not able:
        return _ALL_OF_IT
    if all((built.options.get("num_workers") or 0) == int(value) for built in able):
        return f"the DataLoader has {value if int(value) else 'no'} workers already"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    count = int(value)

    def why_not(made: Made) -> str | None:
        if not count:
            _without_workers(made)
            return None
        return _why_not(made, count)

    set_in_loaders(training, "num_workers", count, why_not)


def _without_workers(made: Made) -> None:
    """torch refuses arguments of workers where there are none."""
    for argument in _OF_WORKERS:
        made.arguments.pop(argument, None)


def _why_not(made: Made, count: int) -> str | None:
    from torch.utils.data import IterableDataset

    dataset = made.value("dataset")
    if count > 1 and isinstance(dataset, IterableDataset):
        return _ALL_OF_IT
    if any(tensor.is_cuda for tensor in getattr(dataset, "tensors", ())):
        return "the dataset is already on the GPU, where workers cannot reach it"
    if multiprocessing.current_process().daemon:
        return "this process is a daemon, so it cannot start workers"
    return None


def patch(script: Script, value: str) -> Proposal:
    many = int(value) > 1
    proposal = patch_loaders(
        script, "num_workers", value, lambda built: not (many and built.iterable)
    )
    if int(value):
        return proposal
    for argument, none in (("persistent_workers", "False"), ("prefetch_factor", "None")):
        if any(argument in built.given for built in training_loaders(script.facts)):
            proposal += patch_loaders(script, argument, none, partial(_gives, argument))
    return proposal


def _gives(argument: str, built: Built) -> bool:
    return argument in built.given


FIX = Fix(
    id="loader-workers",
    effect=Effect.RANDOM,
    may_be=Effect.BIT_IDENTICAL,
    values=("2", "4", "8", "1", "0"),
    accepts=str.isdecimal,
    fits=fits,
    apply=apply,
    patch=patch,
)
