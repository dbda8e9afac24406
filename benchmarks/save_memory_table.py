"""Saving memory on a GPU: what each way keeps for backward, its peak and its step.

    python benchmarks/save_memory_table.py --save rows.json [--seconds 300] [--models resnet50,gpt2]
        [--ways "eager,ours 5%"] [--tiny]
    python benchmarks/save_memory_report.py rows.json [--svg save-memory.svg]

Every training in every way, in one process, one after the other. Rows are saved one by one: a run
that is cut goes on where it ended, and what failed is written beside it. What `save_memory`
promised after its recorded pass stands beside what was measured. One row trains seq2seq with twice
the batch under a cap that leaves the larger batch no room otherwise. All of that row, the training
without a plan included, runs with expandable segments: near a cap, holes between blocks decide.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.append(str(Path(__file__).parent.parent / "src"))

from library_turn import shared_turns
from save_memory_models import (
    COMPILED,
    SEQ2SEQ,
    TINY_SEQ2SEQ,
    WARM_UP,
    WAYS,
    WORKLOADS,
    Changed,
    build,
    build_seq2seq,
    ours,
    sentence_step,
)
from save_memory_report import markdown
from save_memory_rows import measure_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from save_memory_models import Step
    from save_memory_rows import Row

MOST_WARM_UP = 40  # the plan's own steps are looked at once, after twelve of them
BLOCKS, TINY_BLOCKS = 4, 2  # timed
STEPS = 6  # in a block: the host may run ahead, as it does in a training
TWICE = "twice the batch"
CAP_BATCH = 512  # its host does not wait, but twice as many need hardly longer: the seed's case
CAP_ROOM = 1.08  # the cap, over what the smaller batch reserves


def main() -> None:
    options = _options()
    print(markdown(_measure_all(options)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="start no row after this")
    parser.add_argument("--models", default=",".join(WORKLOADS))
    parser.add_argument("--ways", default="", help="separated by semicolons")
    parser.add_argument("--tiny", action="store_true", help="small models, also on a CPU")
    parser.add_argument("--no-cap", action="store_true", help="no rows with twice the batch")
    parser.add_argument("--save", type=Path, help="JSON; read first, written after every row")
    return parser.parse_args()


def _measure_all(options: argparse.Namespace) -> list[Row]:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    ways = _ways(options)
    turns = shared_turns(stops=not all(way in COMPILED for way in ways))
    alone = turns.alone if turns is not None else contextlib.nullcontext

    def measured(cell: Row) -> Row:
        try:
            if cell["way"] in COMPILED:
                return measure(cell["model"], cell["way"], device, alone, tiny=options.tiny)
            with alone():  # from the start: a plan rests on the times of the first steps
                if cell["way"] == TWICE:
                    with _expandable_segments(device):
                        return _cap_row(device, options.tiny)
                now = contextlib.nullcontext
                return measure(cell["model"], cell["way"], device, now, tiny=options.tiny)
        finally:
            clean(device)

    cells = ({"model": model, "way": way} for model, way in _wanted(options))
    return measure_rows(cells, measured, path=options.save, seconds=options.seconds)


def _ways(options: argparse.Namespace) -> list[str]:
    return [way for way in options.ways.split(";") if way] or list(WAYS)


def _wanted(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Eager and ours for all models first, compilations last."""
    models, ways = [name for name in options.models.split(",") if name], _ways(options)
    for way in (way for way in ways if way not in COMPILED and way != TWICE):
        yield from ((model, way) for model in models)
    if "seq2seq" in models and (TWICE in ways if options.ways else not options.no_cap):
        yield ("seq2seq", TWICE)
    yield from ((model, way) for model in models for way in ways if way in COMPILED)


def measure(
    name: str,
    way: str,
    device: torch.device,
    alone: Callable[[], contextlib.AbstractContextManager[Any]],
    *,
    tiny: bool,
) -> dict[str, Any]:
    """One row; bytes are None where torch keeps no account of them."""
    changed = Changed(WAYS[way])
    step = build(name, changed, device, tiny=tiny)
    if way in COMPILED:
        step(0)  # beside others
    with alone():
        began = time.perf_counter()
        for number in range(MOST_WARM_UP):
            step(number)
            if number > WARM_UP + 2 and (changed.saver is None or changed.saver.settled):
                break  # ours first looks at its own steps
        wait(device)
        warm_up_s = time.perf_counter() - began
        held = _HeldAfterForward(changed.model, device)
        if device.type == "cpu" and changed.saver is None:
            held.kept_bytes = _counted(step, changed.model)
        else:
            step(MOST_WARM_UP)
        held.remove()
        wait(device)
        reset_peak(device)
        static_bytes = torch.cuda.memory_allocated() if device.type == "cuda" else None
        ms = [timed(step, device) for _ in range(TINY_BLOCKS if tiny else BLOCKS)]
        loss = step(0)
        steps_ms = _each_step_ms(step, device)
    row = {
        "ms": round(statistics.median(ms), 3),
        "ms_low": round(min(ms), 3),
        "ms_high": round(max(ms), 3),
        "blocks_ms": [round(one, 3) for one in ms],
        "steps_ms": steps_ms,
        "peak_bytes": peak(device),
        "static_bytes": static_bytes,  # weights, gradients, optimizer state
        "kept_bytes": held.kept_bytes,
        "loss": float(loss.detach()),
        "warm_up_s": round(warm_up_s, 1),
    }
    if changed.saver is not None:
        row |= _promised(changed.saver)
        if device.type == "cpu":
            row["kept_bytes"] = changed.saver.held_bytes or row.get("plan_saved_bytes")
    return row


def _promised(saver: Any) -> dict[str, Any]:
    promise, plan = saver.promise, saver.plan
    row: dict[str, Any] = {"notes": [*saver.notes, *(plan.notes if plan is not None else ())]}
    if promise is None or plan is None:
        return row
    interval = "tried_ms" if promise.tried_step else "promised_ms"
    return row | {
        "plan_saved_bytes_before": plan.saved_bytes_before,
        "plan_saved_bytes": plan.saved_bytes,
        "promised_peak_bytes": promise.peak_bytes,
        "promised_peak_low_bytes": promise.peak_low_bytes,
        "promised_peak_high_bytes": promise.peak_high_bytes,
        "promised_peak_bytes_before": promise.peak_bytes_before,
        "promised_ms": promise.planned_step_ns / 1e6,  # before its own steps were timed
        "tried_ms": promise.step_ns / 1e6 if promise.tried_step else None,
        f"{interval}_low": promise.step_low_ns / 1e6,
        f"{interval}_high": promise.step_high_ns / 1e6,
        "promised_ms_before": promise.step_ns_before / 1e6,
        "operators": len(plan.operators),
        "planning_s": round(saver.planning_ns / 1e9, 3),
        "actions": _actions(plan),
    }


def _actions(plan: Any) -> dict[str, int]:
    """Bytes that each action takes away."""
    saved: dict[str, int] = {}
    for row in plan.rows:
        action = row.action.partition(":")[0]
        saved[action] = saved.get(action, 0) + row.size_bytes - row.held_bytes
    return saved


def _cap_row(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Twice the batch under a cap: fails without, trains with `save_memory(batch="2x")`."""
    shape = {**(TINY_SEQ2SEQ if tiny else SEQ2SEQ), "batch": 8 if tiny else CAP_BATCH}
    larger = {**shape, "batch": 2 * shape["batch"]}
    plain = Changed(WAYS["eager"])
    torch.manual_seed(0)
    step = build_seq2seq(shape, plain, device)
    small_ms = _steps_ms(step, device)
    reserved = torch.cuda.max_memory_reserved() if device.type == "cuda" else None
    del step, plain
    clean(device)
    if reserved is not None:
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_ROOM * reserved / total), device)
    try:
        eager = _try_larger(larger, device)
        clean(device)
        saved = _with_saver(shape, larger, device)
    finally:
        if reserved is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    if "ms" in saved:
        saved["throughput_gain"] = round(2 * small_ms / saved["ms"], 3)
    return {
        "cap_bytes": None if reserved is None else round(CAP_ROOM * reserved),
        "batch": shape["batch"],
        "batch_ms": small_ms,
        "larger_without": eager,
        "allocator": "expandable segments",
        **saved,
    }


@contextlib.contextmanager
def _expandable_segments(device: torch.device) -> Iterator[None]:
    """As PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, for what is allocated from now on."""
    if device.type != "cuda":
        yield
        return
    clean(device)
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    configure = configure or torch.cuda.memory._set_allocator_settings
    configure("expandable_segments:True")
    try:
        yield
    finally:
        clean(device)
        configure("expandable_segments:False")


def _try_larger(shape: dict[str, int], device: torch.device) -> str:
    try:
        torch.manual_seed(0)
        step = build_seq2seq(shape, Changed(WAYS["eager"]), device)
        return f"{_steps_ms(step, device)} ms"
    except torch.OutOfMemoryError:
        return "out of memory"


def _with_saver(
    shape: dict[str, int], larger: dict[str, int], device: torch.device
) -> dict[str, Any]:
    """The smaller batch is recorded, then the larger one trains with its plan. Where memory runs
    out, what was allocated and what was reserved tell whether the plan or holes were the cause."""
    torch.manual_seed(0)
    changed = Changed(ours(batch="2x"))
    step = build_seq2seq(shape, changed, device)
    for number in range(WARM_UP + 2):
        step(number)
    del step
    clean(device)
    saver = changed.saver
    assert saver is not None
    optimizer = torch.optim.Adam(changed.model.parameters(), lr=1e-3)
    reset_peak(device)
    row: dict[str, Any] = {}
    try:
        row["ms"] = _steps_ms(sentence_step(changed.model, optimizer, larger), device)
    except torch.OutOfMemoryError as error:
        row["error"] = str(error)
    row |= {"peak_bytes": peak(device), "peak_reserved_bytes": peak_reserved(device)}
    return row | _promised(saver)


def _steps_ms(step: Step, device: torch.device) -> float:
    for number in range(4):
        step(number)
    wait(device)
    return round(
        statistics.median(
            timed(step, device) for _ in range(TINY_BLOCKS if device.type == "cpu" else BLOCKS)
        ),
        3,
    )


def timed(step: Step, device: torch.device) -> float:
    """Milliseconds of a step. On a GPU the first one of a block is left out: no training has an
    idle device before each few steps, and a host that is not ahead yet makes that one longer."""
    if device.type == "cuda":
        return statistics.fmean(_each_step_ms(step, device)[1:])
    began = time.perf_counter()
    for number in range(2):
        step(number)
    return (time.perf_counter() - began) / 2 * 1e3


def _each_step_ms(step: Step, device: torch.device) -> list[float]:
    """Of one block, on the device's clock: the first ones tell what a host that is not ahead yet
    costs."""
    if device.type != "cuda":
        return []
    wait(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for number, mark in enumerate(marks[1:]):
        step(number)
        mark.record()
    wait(device)
    pairs = itertools.pairwise(marks)
    return [round(one.elapsed_time(following), 3) for one, following in pairs]


class _HeldAfterForward:
    """Bytes that the model's forward pass leaves allocated, its outputs among them."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.kept_bytes: int | None = None
        self._begun = 0
        self._handles: list[Any] = []
        if device.type == "cuda":
            self._handles = [
                model.register_forward_pre_hook(self._enters),
                model.register_forward_hook(self._leaves),
            ]

    def _enters(self, *_: Any) -> None:
        self._begun = torch.cuda.memory_allocated()

    def _leaves(self, *_: Any) -> None:
        self.kept_bytes = torch.cuda.memory_allocated() - self._begun

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _counted(step: Step, model: Any) -> int:
    """What one step saves for backward, without parameters, where no allocator tells."""
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(0)
    return sum(sizes.values())


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def peak_reserved(device: torch.device) -> int | None:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    main()
