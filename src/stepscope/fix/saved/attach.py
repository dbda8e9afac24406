"""`save_memory(model)`: check what is asked for, attach to eager or compiled models, and
write the plan into the run folder.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from stepscope.errors import UsageError
from stepscope.fix.model_structure import is_compiled
from stepscope.fix.saved.compiled.compiled_saver import CompiledSaver
from stepscope.fix.saved.memory_saver import MemorySaver
from stepscope.fix.saved.save_plan import SavePlan
from stepscope.fix.saved.step_record import LOSSY
from stepscope.records.change_values import MemoryTarget, batch_factor, size_in_bytes


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
    compile: bool = False,  # noqa: A002  # the word of torch
    rounding: bool = False,
) -> MemorySaver:
    """Save less for the model's backward pass, with the same results to the last bit.

    `reduce=0.5` halves what backward keeps, `budget="12GB"` limits what a step needs,
    `batch="2x"` makes twice the batch fit, `max_slowdown=0.05` limits the time that recomputing
    adds to a step; without any, as little as possible is kept. The pass after `warmup` passes is
    recorded, later ones follow the plan. With `dry_run` the plan is made, `promise` says what it
    would bring, and nothing is changed; `plan` repeats an earlier one. `lossy="fp8-e4m3"` (or
    "bf16", "fp16", "fp8-e5m2", "4-bit") also rounds what is kept, after forward has used it:
    results then differ. With `heavy`, matmuls and convolutions may be repeated as well.

    A model that torch.compile compiles, or that `compile=True` compiles here, is planned when its
    graphs are compiled: call this before its first step. Matmuls and convolutions may always be
    repeated there, and on a GPU sums may be rounded as by another compilation. `rounding=True` lets
    the compiler fuse what is repeated with its readers: more is freed, and more is rounded."""
    if lossy is not None and lossy not in LOSSY:
        raise UsageError(f"lossy={lossy!r}: pass one of {', '.join(LOSSY)}")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module  # what DDP itself does differs from step to step
    _check(model, reduce, max_slowdown, warmup, plan)
    target = MemoryTarget(
        budget_bytes=None if budget is None else _bytes(budget),
        reduce=reduce,
        max_slowdown=max_slowdown,
        batch=None if batch is None else _factor(batch),
        heavy=heavy,
    )
    if compile and not is_compiled(model):
        model.compile()
    if is_compiled(model):
        given = {"plan": plan, "lossy": lossy}
        refused = [name for name, value in given.items() if value is not None]
        if refused:
            raise UsageError(
                f"{refused[0]}= is not supported for a compiled model, whose plan is made when its "
                "graphs are compiled: leave it out, or call save_memory on the model before it is "
                "compiled"
            )
        return CompiledSaver(model, target, dry_run=dry_run, rounding=rounding)
    if rounding:
        raise UsageError("rounding=True is for compiled models: pass compile=True as well")
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


# What a run folder keeps of a plan: records/memory.py reads it.

_MOST_VALUES = 40
_MOST_NOTES = 16


def saving_content(saver: MemorySaver) -> dict[str, Any] | None:
    """None before a pass was recorded."""
    plan, promise = saver.plan, saver.promise
    if plan is None:
        return None
    largest = sorted(plan.rows, key=lambda row: -max(row.size_bytes, row.held_bytes))
    content: dict[str, Any] = {
        "schema": 1,
        "target": plan.target,
        "saved_bytes_before": plan.saved_bytes_before,
        "saved_bytes": plan.saved_bytes,
        "held_bytes": saver.held_bytes,
        "peak_bytes_before": plan.peak_bytes_before,
        "peak_bytes": plan.peak_bytes,
        "step_peak_bytes_before": plan.step_peak_bytes_before,
        "step_peak_bytes": plan.step_peak_bytes,
        "extra_ns": plan.extra_ns,
        "measured_step_ns": saver.measured_step_ns,
        "actions": _by_action(plan),
        "values": [asdict(row) for row in largest[:_MOST_VALUES]],
        "timeline": None if plan.timeline is None else asdict(plan.timeline),
        "notes": [*plan.notes, *saver.notes][:_MOST_NOTES],
    }
    if promise is not None:
        if promise.whole_step:
            content["step_peak_bytes_before"] = promise.peak_bytes_before
            content["step_peak_bytes"] = promise.peak_bytes
        names = ("step_ns_before", "step_ns", "step_low_ns", "step_high_ns")
        content |= {name: getattr(promise, name) for name in names}
    return content


def _by_action(plan: SavePlan) -> list[dict[str, Any]]:
    """Without the encodings' names. A value that is kept only to start from held nothing before."""
    actions: dict[str, dict[str, Any]] = {}
    for row in plan.rows:
        action = row.action.partition(":")[0]
        entry = actions.setdefault(
            action,
            {"action": action, "values": 0, "before_bytes": 0, "held_bytes": 0, "cost_ns": 0},
        )
        entry["values"] += 1
        entry["before_bytes"] += row.size_bytes if row.was_kept else 0
        entry["held_bytes"] += row.held_bytes
        entry["cost_ns"] += row.cost_ns
    return [actions[action] for action in sorted(actions)]
