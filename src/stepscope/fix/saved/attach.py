"""`save_memory(model)`: checks what is asked for, and attaches to eager or compiled models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from stepscope.errors import UsageError
from stepscope.fix.saved.choose import MemoryTarget
from stepscope.fix.saved.compiled_saver import is_compiled, save_compiled
from stepscope.fix.saved.memory_saver import MemorySaver

if TYPE_CHECKING:
    from stepscope.fix.saved.save_plan import SavePlan

_UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_memory(
    model: torch.nn.Module,
    *,
    reduce: float | None = None,
    budget: str | int | None = None,
    max_slowdown: float | None = None,
    plan: SavePlan | None = None,
    dry_run: bool = False,
    warmup: int = 1,
) -> MemorySaver:
    """Keep less for the model's backward pass, with the same results to the last bit.

    `reduce=0.5` halves what backward keeps, `budget="2GB"` limits it, `max_slowdown=0.05` limits
    the time that recomputing adds to a step; without any, as little as possible is kept. The pass
    after `warmup` passes is recorded, later ones follow the plan. With `dry_run` the plan is made,
    and nothing is changed; `plan` repeats an earlier one."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module  # what DDP itself does differs from step to step
    _check(model, reduce, max_slowdown, warmup)
    if is_compiled(model):
        given = {"budget": budget, "max_slowdown": max_slowdown, "plan": plan}
        return save_compiled(model, reduce, given)
    target = MemoryTarget(None if budget is None else _bytes(budget), reduce, max_slowdown)
    return MemorySaver(model, target, plan=plan, dry_run=dry_run, warmup=warmup)


def _check(model: Any, reduce: float | None, max_slowdown: float | None, warmup: int) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"save_memory needs a torch.nn.Module, not {type(model).__name__}")
    if reduce is not None and not 0 < reduce < 1:
        raise UsageError(f"reduce={reduce}: pass a share between 0 and 1, such as 0.5")
    if max_slowdown is not None and max_slowdown < 0:
        raise UsageError(f"max_slowdown={max_slowdown}: pass a share of the step, such as 0.05")
    if warmup < 0:
        raise UsageError(f"warmup={warmup}: pass a number of passes, 0 or more")


def _bytes(budget: str | int) -> int:
    """Of "12GB", "500 MiB" or a number."""
    matched = re.fullmatch(r"\s*([\d.]+)\s*([KMG]I?B)?\s*", str(budget).upper())
    try:
        size_bytes = float(matched[1]) * _UNITS[matched[2] or ""] if matched else 0
    except ValueError:
        size_bytes = 0
    if size_bytes <= 0:
        raise UsageError(f"budget={budget!r}: pass bytes, or a size such as '2GB' or '500MiB'")
    return int(size_bytes)
