"""Whole steps on a GPU that was left out, from the kernels of a step on another one.

The tables time every operator alone, and the passes of whole steps. An operator's time is scaled
so that a pass adds up to its recorded time, as the kernels of a trace do. Then every kernel is
moved as `whatif --set gpu=` moves it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import gpu_tables
from stepscope.predict.other_gpu import gpu as gpus
from stepscope.predict.other_gpu import kernel_time
from stepscope.predict.other_gpu.kernel_time import CONFIDENCE, find_operator, inside_step
from stepscope.predict.other_gpu.step import LEAST_KEPT, STEP_SPREAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stepscope.predict.other_gpu.gpu import TransferFit

    Workload = tuple[str, str, str, str]  # model, mode, length, batch
    Passes = tuple[float, ...]  # milliseconds: forward, and backward when training

# The backward pass of these models multiplies twice as much as the forward one. A forward pass
# above this share of it contradicts its own operators, whose sum is half of the backward pass's.
MOST_FORWARD = 0.7
DIFFERENT = 0.05  # two GPUs whose steps are closer than this have no order
_OLD = gpus.OLD_GENERATIONS


class Kernel(NamedTuple):
    """One kernel of a pass; `shape` is of the operator `op`, or bytes when `op` is "move"."""

    op: str
    shape: tuple[float, ...]
    ms: float  # of all its repetitions
    repeat: int


class Step(NamedTuple):
    """A predicted step beside the measured one."""

    workload: Workload
    source: str
    target: str
    measured: float
    predicted: float
    calibrated: float | None  # predicted with the rates that one calibration there shows
    by_flops: float
    doubt: float
    consistent: bool  # both records agree with their own operators
    last_pass: float  # the error of the last pass alone, backward when training

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        return abs(math.log(self.predicted / self.measured)) <= CONFIDENCE * self.doubt


def print_steps(fit_without: Callable[[str], TransferFit], whole: TransferFit) -> None:
    steps = predicted_steps(fit_without, whole)
    print("| step | from | to (left out) | measured | predicted | off | calibrated | FLOP ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for step in steps:
        calibrated = (
            "" if step.calibrated is None else f"{step.calibrated / step.measured - 1:+.1%}"
        )
        doubtful = "" if step.consistent else " (contradicts itself)"
        print(
            f"| {' '.join(step.workload)}{doubtful} | {step.source} | {step.target} "
            f"| {step.measured:.4g} ms | {step.predicted:.4g} ms | {step.error:+.1%} "
            f"| {calibrated} | {step.by_flops / step.measured - 1:+.0%} |"
        )
    print("\n| steps | cases | mean | median | worst | bias | inside 90% | FLOP ratio, mean |")
    print("|---|---|---|---|---|---|---|---|")
    sound = [step for step in steps if step.consistent]
    for name, chosen in _groups(sound):
        print(_summary(name, chosen))
    print(_summary("records that contradict themselves", [s for s in steps if not s.consistent]))
    backward = np.abs([step.last_pass for step in steps if step.workload[1] == "train"])
    print(
        f"\nBackward passes of all {len(backward)} training steps, those too: mean "
        f"{backward.mean():.1%}, worst {backward.max():.0%}."
    )
    _print_calibrated(sound)
    _print_ranking(sound, read_steps())


def _groups(steps: Sequence[Step]) -> Iterable[tuple[str, list[Step]]]:
    modern = [step for step in steps if not _is_old(step.source) and not _is_old(step.target)]
    nvidia = [step for step in modern if not step.target.startswith("MI")]
    yield "training", [step for step in steps if step.workload[1] == "train"]
    yield "training, NVIDIA to NVIDIA", [s for s in nvidia if s.workload[1] == "train"]
    yield "Volta and later, NVIDIA to NVIDIA", nvidia
    yield "Volta and later", modern
    for target in sorted({step.target for step in steps}):
        yield f"to {target}", [step for step in steps if step.target == target]
    yield "all", list(steps)


def _summary(name: str, steps: Sequence[Step]) -> str:
    if not steps:
        return f"| {name} | 0 |  |  |  |  |  |  |"
    errors = np.array([step.error for step in steps])
    plain = np.array([step.by_flops / step.measured - 1 for step in steps])
    return (
        f"| {name} | {len(steps)} | {np.abs(errors).mean():.1%} | {np.median(np.abs(errors)):.1%} "
        f"| {np.abs(errors).max():.0%} | {np.median(errors):+.1%} "
        f"| {np.mean([step.inside for step in steps]):.0%} | {np.abs(plain).mean():.0%} |"
    )


def _print_calibrated(steps: Sequence[Step]) -> None:
    """Only GPUs that the tables time operators of can be calibrated here."""
    print("\n| one calibration there | cases | mean without | mean with | worst with |")
    print("|---|---|---|---|---|")
    known = [step for step in steps if step.calibrated is not None]
    for target in [*sorted({step.target for step in known}), "all"]:
        chosen = [step for step in known if target in ("all", step.target)]
        after = np.abs([(step.calibrated or 0.0) / step.measured - 1 for step in chosen])
        before = np.abs([step.error for step in chosen])
        print(
            f"| {target} | {len(chosen)} | {before.mean():.1%} | {after.mean():.1%} "
            f"| {after.max():.0%} |"
        )


def _print_ranking(steps: Sequence[Step], measured: dict[tuple[Workload, str], Passes]) -> None:
    """Pairs of GPUs in the right order, among them the source, whose step is known."""
    right = pairs = best = questions = 0
    by_question: dict[tuple[Workload, str], list[Step]] = defaultdict(list)
    for step in steps:
        by_question[step.workload, step.source].append(step)
    for (workload, source), chosen in by_question.items():
        known = sum(measured[workload, source])
        times = [(known, known), *((step.predicted, step.measured) for step in chosen)]
        for one, other in combinations(times, 2):
            if abs(math.log(one[1] / other[1])) >= DIFFERENT:
                pairs += 1
                right += (one[0] < other[0]) == (one[1] < other[1])
        questions += 1
        best += min(times)[1] <= (1 + DIFFERENT) * min(time for _, time in times)
    print(
        f"\nOrder of two GPUs whose steps differ by 5%: right in {right} of {pairs} pairs "
        f"({right / pairs:.0%}); the fastest GPU, or one within 5% of it, named {best} of "
        f"{questions} times."
    )


def predicted_steps(
    fit_without: Callable[[str], TransferFit], whole: TransferFit
) -> tuple[Step, ...]:
    """Every step that one GPU's operators and another GPU's whole step are recorded of."""
    passes, measured = read_kernels(), read_steps()
    fits: dict[str, TransferFit] = {}
    steps = []
    for (workload, source), kernels in sorted(passes.items()):
        for (other, target), truth in sorted(measured.items()):
            if other != workload or target == source or (workload, source) not in measured:
                continue
            if target not in fits:
                fits[target] = fit_without(target)
            one, two = (_gpu(name, fits[target]) for name in (source, target))
            recorded = measured[workload, source]
            calibrated = None
            if "fp32" in whole.measured.get(target, {}):
                there = _gpu(target, whole)
                calibrated = sum(_moved_step(kernels, recorded, one, there, fits[target])[0])
            predicted, doubt = _moved_step(kernels, recorded, one, two, fits[target])
            steps.append(
                Step(
                    workload=workload,
                    source=source,
                    target=target,
                    measured=sum(truth),
                    predicted=sum(predicted),
                    calibrated=calibrated,
                    by_flops=sum(recorded) * one.row.tflops["fp32"] / two.row.tflops["fp32"],
                    doubt=doubt,
                    consistent=_consistent(truth) and _consistent(recorded),
                    last_pass=predicted[-1] / truth[-1] - 1,
                )
            )
    return tuple(steps)


def _consistent(passes: Passes) -> bool:
    return len(passes) < 2 or passes[0] <= MOST_FORWARD * passes[1]


def _moved_step(
    passes: Sequence[Sequence[Kernel]],
    recorded: Passes,
    source: gpus.Gpu,
    target: gpus.Gpu,
    fit: TransferFit,
) -> tuple[Passes, float]:
    """Milliseconds on the target, and the standard deviation of the logarithm of their sum."""
    by_family: dict[str, float] = defaultdict(float)
    moved = []
    for kernels, pass_ms in zip(passes, recorded, strict=True):
        scale = pass_ms / sum(kernel.ms for kernel in kernels)
        pairs = [_moved(kernel, kernel.ms * scale, source, target, fit) for kernel in kernels]
        moved.append(sum(ms for _, ms in pairs))
        for family, ms in pairs:
            by_family[family] += ms
    total = sum(moved)
    close = gpus.closeness(source.row, target.row)
    variance = STEP_SPREAD[close] ** 2
    for family, ms in by_family.items():
        variance += (ms / total * fit.spread[family][close] * fit.common) ** 2
    return tuple(moved), math.sqrt(variance)


def _moved(
    kernel: Kernel, ms: float, source: gpus.Gpu, target: gpus.Gpu, fit: TransferFit
) -> tuple[str, float]:
    """Products go by tiles and waves, others by bytes, as in a recorded step."""
    before, after = (modelled_ms(kernel, gpu, fit) for gpu in (source, target))
    family = "elementwise" if kernel.op == "move" else find_operator(kernel.op).family
    if family not in ("linear", "bmm"):
        return family, ms * after / before
    kept = max(LEAST_KEPT, fit.kept[family][gpus.closeness(source.row, target.row)])
    each = ms / kernel.repeat
    return family, kernel.repeat * after * (each / before) ** kept


def modelled_ms(kernel: Kernel, gpu: gpus.Gpu, fit: TransferFit) -> float:
    if kernel.op == "move":
        moved = np.array([4.0 * kernel.shape[0]])
        return max(0.002, float(kernel_time.moved_ms(moved, gpu, fit)[0]))
    time = find_operator(kernel.op).model(np.array([kernel.shape]), "fp32", gpu, inside_step(fit))
    return max(0.002, float(time[0]))


def read_kernels() -> dict[tuple[Workload, str], tuple[list[Kernel], ...]]:
    """Kernels of the forward pass, and of the backward pass with gradient accumulation."""
    passes: dict[tuple[Workload, str], tuple[list[Kernel], ...]] = {}
    for row in gpu_tables.rows("model_ops_fp32.csv.gz"):
        key = (row["model"], row["mode"], row["seq"], row["batch"]), row["gpu"]
        count = 2 if row["mode"] == "train" else 1
        lists = passes.setdefault(key, tuple([] for _ in range(count)))
        columns = (("forward", ("fw_ms",)), ("backward", ("bw_ms", "acc_ms")))[:count]
        for kernels, (names, times) in zip(lists, columns, strict=True):
            ms = sum(float(row[time] or 0) for time in times)
            kernels.extend(_shared_out(row[names], ms, int(row["repeat"])))
    return passes


def _shared_out(names: str, ms: float, repeat: int) -> Iterable[Kernel]:
    """An operator's time, in equal parts for its kernels."""
    read = [kernel for kernel in map(_read_kernel, names.split()) if kernel]
    if ms > 0:
        for op, shape in read or [("move", (1.0,))]:
            yield Kernel(op, shape, ms * repeat / max(1, len(read)), repeat)


def read_steps() -> dict[tuple[Workload, str], Passes]:
    steps: dict[tuple[Workload, str], Passes] = {}
    for row in gpu_tables.rows("end_to_end.csv"):
        if row["source"] == "neusight" and row["n_gpus"] == "1" and not row["option"]:
            key = (row["model"], row["mode"], row["seq"], row["batch"]), row["gpu"]
            steps[key] = tuple(float(row[name]) for name in ("fw_ms", "bw_ms") if row[name])
    return steps


def _gpu(name: str, fit: TransferFit) -> gpus.Gpu:
    row = gpus.find_row(name)
    assert row is not None, name
    return gpus.make_gpu(row, fit)


def _is_old(name: str) -> bool:
    row = gpus.find_row(name)
    return row is not None and row.generation in _OLD


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
