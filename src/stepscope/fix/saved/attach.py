"""`save_memory(model)`: checks what is asked for, and attaches to eager or compiled models."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.errors import UsageError
from stepscope.fix.compiled_modules import is_compiled
from stepscope.fix.saved.compiled_saver import save_compiled
from stepscope.fix.saved.encoding_names import LOSSY
from stepscope.fix.saved.memory_saver import MemorySaver
from stepscope.fix.saved.save_plan import SavePlan
from stepscope.records.memory_targets import MemoryTarget, batch_factor, size_in_bytes


def save_memory(
    model: torch.nn.Module,
    *,
    reduce: float | None = None,
    budget: str | int | None = None,
    max_slowdown: float | None = None,
    batch: str | float | None = None,
    plan: SavePlan | None = None,
    dry_run: bool = False,
    warmup: int = 1,
    lossy: str | None = None,
    heavy: bool = False,
) -> MemorySaver:
    """Save less for the model's backward pass, with the same results to the last bit.

    `reduce=0.5` halves what backward keeps, `budget="12GB"` limits what a step needs,
    `batch="2x"` makes twice the batch fit, `max_slowdown=0.05` limits the time that recomputing
    adds to a step; without any, as little as possible is kept. The pass after `warmup` passes is
    recorded, later ones follow the plan. With `dry_run` the plan is made, `promise` says what it
    would bring, and nothing is changed; `plan` repeats an earlier one. `lossy="fp8-e4m3"` (or
    "bf16", "fp16", "fp8-e5m2", "4-bit") also rounds what is kept, after forward has used it:
    results then differ. With `heavy`, matrix products and convolutions may be repeated as well."""
    if lossy is not None and lossy not in LOSSY:
        raise UsageError(f"lossy={lossy!r}: pass one of {', '.join(LOSSY)}")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module  # what DDP itself does differs from step to step
    _check(model, reduce, max_slowdown, warmup, plan)
    if is_compiled(model):
        others = {"budget": budget, "max_slowdown": max_slowdown, "batch": batch, "plan": plan}
        others |= {"dry_run": dry_run or None, "lossy": lossy, "heavy": heavy or None}
        return save_compiled(model, reduce, others)
    target = MemoryTarget(
        budget_bytes=None if budget is None else _bytes(budget),
        reduce=reduce,
        max_slowdown=max_slowdown,
        batch=None if batch is None else _factor(batch),
        heavy=heavy,
    )
    return MemorySaver(model, target, plan=plan, dry_run=dry_run, warmup=warmup, lossy=lossy)


def _check(model: Any, reduce: Any, max_slowdown: Any, warmup: Any, plan: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"save_memory needs a torch.nn.Module, not {type(model).__name__}")
    if reduce is not None and not (_is_number(reduce) and 0 < reduce < 1):
        raise UsageError(f"reduce={reduce!r}: pass a share between 0 and 1, such as 0.5")
    if max_slowdown is not None and not (_is_number(max_slowdown) and max_slowdown >= 0):
        raise UsageError(f"max_slowdown={max_slowdown!r}: pass a share of the step, such as 0.05")
    if not isinstance(warmup, int) or warmup < 0:
        raise UsageError(f"warmup={warmup!r}: pass a number of passes, 0 or more")
    if plan is not None and not isinstance(plan, SavePlan):
        raise UsageError(
            f"plan= is a {type(plan).__name__}. Pass a SavePlan, which "
            "SavePlan.from_json(text) reads"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _bytes(budget: str | int) -> int:
    size_bytes = size_in_bytes(budget)
    if size_bytes is None:
        raise UsageError(f"budget={budget!r}: pass bytes, or a size such as '2GB' or '500MiB'")
    return size_bytes


def _factor(batch: str | float) -> float:
    try:
        return batch_factor(batch)
    except ValueError as error:
        raise UsageError(f"batch: {error}") from None
