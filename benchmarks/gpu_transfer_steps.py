"""Whole steps on a GPU that was left out: another GPU's operators moved, its step scaled."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import gpu_tables
from stepscope.predict.other_gpu import gpu as gpus
from stepscope.predict.other_gpu import kernel_time
from stepscope.predict.other_gpu.retime import find_operator, retime_many

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.predict.other_gpu.fitted import TransferFit

# How far a step is from the sum of its operators says more of the machine than of the GPU.
STEP_KEPT = 0.5
Workload = tuple[str, str, str, str]  # model, mode, length, batch


class Part(NamedTuple):
    """One pass of one operator: its kernels, its time, how often it repeats."""

    kernels: str
    ms: float
    repeat: int


def print_steps(fit_without: Callable[[str], TransferFit]) -> None:
    parts, steps = read_parts(), read_steps()
    fits: dict[str, TransferFit] = {}
    print("| model | from | to (left out) | measured | predicted | off | FLOP ratio off |")
    print("|---|---|---|---|---|---|---|")
    errors, plain = [], []
    for (workload, source), ops in sorted(parts.items()):
        for (other, target), measured in sorted(steps.items()):
            if other != workload or target == source or (workload, source) not in steps:
                continue
            if target not in fits:
                fits[target] = fit_without(target)
            fit = fits[target]
            one, two = (_gpu(name, fit) for name in (source, target))
            before = sum(part.ms * part.repeat for part in ops)
            after = sum(_moved_ms(part, one, two, fit) * part.repeat for part in ops)
            predicted = after * (steps[workload, source] / before) ** STEP_KEPT
            flops = steps[workload, source] * one.row.tflops["fp32"] / two.row.tflops["fp32"]
            errors.append(predicted / measured - 1)
            plain.append(flops / measured - 1)
            print(
                f"| {' '.join(workload)} | {source} | {target} | {measured:.4g} ms "
                f"| {predicted:.4g} ms | {errors[-1]:+.1%} | {plain[-1]:+.0%} |"
            )
    print(
        f"\n{len(errors)} steps: mean {np.abs(errors).mean():.1%}, median "
        f"{np.median(np.abs(errors)):.1%}, worst {np.abs(errors).max():.1%}; by the ratio of "
        f"FLOP/s mean {np.abs(plain).mean():.0%}, worst {np.abs(plain).max():.0%}"
    )


def read_parts() -> dict[tuple[Workload, str], list[Part]]:
    parts: dict[tuple[Workload, str], list[Part]] = defaultdict(list)
    for row in gpu_tables.rows("model_ops_fp32.csv.gz"):
        key = (row["model"], row["mode"], row["seq"], row["batch"]), row["gpu"]
        repeat = int(row["repeat"])
        for kernels, column in (("forward", "fw_ms"), ("backward", "bw_ms"), ("", "acc_ms")):
            ms = float(row[column] or 0)
            if ms > 0:
                parts[key].append(Part(row.get(kernels, "") if kernels else "", ms, repeat))
    return parts


def read_steps() -> dict[tuple[Workload, str], float]:
    steps = {}
    for row in gpu_tables.rows("end_to_end.csv"):
        if row["source"] == "neusight" and row["n_gpus"] == "1" and not row["option"]:
            key = (row["model"], row["mode"], row["seq"], row["batch"]), row["gpu"]
            steps[key] = float(row["step_ms"])
    return steps


def _gpu(name: str, fit: TransferFit) -> gpus.Gpu:
    row = gpus.find_row(name)
    assert row is not None, name
    return gpus.make_gpu(row, fit)


def _moved_ms(part: Part, source: gpus.Gpu, target: gpus.Gpu, fit: TransferFit) -> float:
    """The time is shared between its kernels as the model on the source says."""
    kernels = [kernel for kernel in map(_read_kernel, part.kernels.split()) if kernel]
    if not kernels:
        return part.ms * source.bytes_s / target.bytes_s
    share = part.ms / len(kernels)
    return sum(_retimed(op, shape, share, source, target, fit) for op, shape in kernels)


def _retimed(
    op: str,
    shape: tuple[float, ...],
    ms: float,
    source: gpus.Gpu,
    target: gpus.Gpu,
    fit: TransferFit,
) -> float:
    if op == "move":
        moved = np.array([4.0 * shape[0]])
        before, after = (
            float(kernel_time.moved_ms(moved, gpu, fit)[0]) for gpu in (source, target)
        )
        return ms * (0.02 + after) / (0.02 + before)
    known = find_operator(op)
    launch = fit.launch_ms.get(known.family, 0.0)
    shapes, times = np.array([shape]), np.array([ms])
    return float(
        retime_many(known, shapes, "fp32", times, source, target, launch_ms=launch, fit=fit)[0]
    )


def _read_kernel(text: str) -> tuple[str, tuple[float, ...]] | None:
    kind, _, rest = text.partition(":")
    if kind == "MEM":
        sizes = [math.prod(map(float, one.split("x"))) for one in rest.split(">") if one]
        return "move", (sum(sizes),)
    shape = tuple(float(size) for size in rest.split("x") if size)
    if kind == "Linear" and len(shape) == 3:
        return "linear", (1.0, shape[0], shape[2], shape[1])
    if kind == "BMM" and len(shape) == 4:
        return "bmm", (shape[0], shape[1], shape[3], shape[2])
    if kind.startswith("VEC") and len(shape) == 2:
        return kind.removeprefix("VEC"), shape
    return None
