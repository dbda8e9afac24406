"""One kernel's time on another GPU, from its time on this one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.predict.other_gpu import kernel_time
from stepscope.predict.other_gpu.gpu import closeness, process_name, transfer_fit, unit_of
from stepscope.records.dtypes import PEAK_BYTES
from stepscope.records.normal import NORMAL_90

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.predict.other_gpu.gpu import Gpu, GpuRow, TransferFit

    Floats = NDArray[np.float64]
    KernelModel = Callable[[Floats, str, Gpu, TransferFit], Floats]

CONFIDENCE = NORMAL_90  # of the standard deviation: nine of ten times lie inside
KERNEL_FLOOR_MS = 0.002  # no kernel is shorter
_TWO_INPUTS = frozenset({"add", "mul", "div", "pow"})
_ONE_INPUT = frozenset({"addu", "mulu", "divu", "powu", "relu", "gelu", "tanh", "embedding"})
# Each of these reads or writes this many tensors.
_TENSORS = dict.fromkeys(_TWO_INPUTS, 3.0) | dict.fromkeys(_ONE_INPUT, 2.0)
_TENSORS |= {"silu_mul": 3.0, "rope": 2.0}
_CONVOLUTION_POWER = 0.25  # convolutions draw less power than products
_ONE_TILE = frozenset({"ampere", "ada", "hopper", "blackwell"})
_LAUNCH_SPREAD = 0.2  # of hosts' launch times, as a standard deviation
# A model's share of the source's time is trusted down to this: the rest may be the host's.
_LEAST_KERNEL = 0.8


class ModelledOperator(NamedTuple):
    """How one kind of operator is modelled."""

    family: str
    columns: int  # of its shape
    model: KernelModel

    def family_in(self, dtype: str) -> str:
        """Products on tensor cores are a family of their own."""
        return "tensor" if self.columns == 4 and unit_of(dtype) == "tensor" else self.family


def retime(
    *,
    op: str,
    shape: Sequence[float],
    dtype: str,
    ms: float,
    source: str | Gpu,
    target: str | Gpu,
    launch_ms: float | None = None,
) -> tuple[float, float, float]:
    """Milliseconds on `target`, with low and high: nine of ten times lie between them.

    `launch_ms` is the host's time inside `ms`; a kernel's own time, as profilers record it, has
    none. By default fp32 times hold as much as times taken with events do. Names of operators and
    GPUs are those of docs/reference/cli/gpus.md; shapes are (batch, m, n, k) for matmuls and
    (rows, columns) for elementwise operators.
    """
    if not ms > 0 or not math.isfinite(ms):
        raise UsageError(f"retime: ms={ms!r} is not a time: give milliseconds above 0")
    known = find_operator(op)
    if len(shape) != known.columns:
        raise UsageError(f"retime: {op} needs a shape of {known.columns} numbers, not {shape!r}")
    sides = shape[:-1] if op == "conv" else shape  # a convolution's padding may be 0
    if not all(math.isfinite(side) and side > 0 for side in sides):
        raise UsageError(f"retime: {shape!r} is not a shape of {op}. Give sides above 0")
    before, after = _as_gpu(source), _as_gpu(target)
    for gpu in (before, after):
        if dtype not in gpu.rates:
            raise UsageError(f"retime: no {dtype} rate is known for {gpu.name}")
    if before == after:
        return ms, ms, ms
    fit, alone = transfer_fit(), launch_ms is None
    if launch_ms is None:
        launch_ms = fit.launch_ms.get(known.family, 0.0) if dtype == "fp32" else 0.0
    time = retime_many(
        known,
        np.array([shape], np.float64),
        dtype,
        np.array([ms], np.float64),
        before,
        after,
        launch_ms=launch_ms,
        alone=alone or launch_ms > 0,
    )
    predicted = float(time[0])
    doubt = kernel_doubt(known.family_in(dtype), dtype, before, after)
    half = CONFIDENCE * math.hypot(doubt, float(launch_doubt(launch_ms, time)[0]))
    return predicted, predicted * math.exp(-half), predicted * math.exp(half)


def retime_many(
    known: ModelledOperator,
    shapes: Floats,
    dtype: str,
    ms: Floats,
    source: Gpu,
    target: Gpu,
    *,
    launch_ms: float = 0.0,
    source_launch_ms: float | None = None,
    alone: bool = False,
    fit: TransferFit | None = None,
) -> Floats:
    """Times on the target. A kernel keeps part of how far it is from the model on the source.

    `alone` kernels were timed by themselves, again and again; others are a step's.
    """
    fit = fit or transfer_fit()
    if not alone:
        fit = inside_step(fit)
    before = known.model(shapes, dtype, source, fit)
    after = known.model(shapes, dtype, target, fit)
    own = fit.hidden_launch * (launch_ms if source_launch_ms is None else source_launch_ms)
    host = np.clip(ms - _LEAST_KERNEL * before, 0.0, own)
    # A kernel shorter than its host's launch leaves at least a little time for itself.
    deviation = np.maximum(ms - host, KERNEL_FLOOR_MS) / np.maximum(before, KERNEL_FLOOR_MS)
    kept = fit.kept[known.family_in(dtype)][closeness(source.row, target.row)]
    kernel = np.maximum(after, KERNEL_FLOOR_MS) * deviation**kept
    if not launch_ms:
        return np.asarray(kernel, np.float64)
    # Times without the host's share, such as a profiler's, show none on the target either.
    held = np.minimum(1.0, host / own)
    return np.asarray(
        np.maximum(launch_ms * held, fit.hidden_launch * launch_ms * held + kernel), np.float64
    )


def inside_step(fit: TransferFit) -> TransferFit:
    """For kernels of a step: it has brought the clocks down before, and used the cache."""
    products = {kind: replace(how, calm_ms=0.0, copies=0) for kind, how in fit.products.items()}
    return replace(fit, products=products)


def kernel_doubt(family: str, dtype: str, source: Gpu, target: Gpu) -> float:
    """Standard deviation of the logarithm of one predicted time."""
    fit = transfer_fit()
    close = closeness(source.row, target.row)
    spread = fit.spread[family][close]
    if target.calibrated:
        return spread / 2
    if close != "chip" and f"{process_name(target.row)} {unit_of(dtype)}" in fit.power.estimated:
        spread = math.hypot(spread, fit.estimated)
    return spread


def launch_doubt(launch_ms: float, predicted_ms: Floats) -> Floats:
    """For the part of a time that another host's launch may be."""
    doubt: Floats = _LAUNCH_SPREAD * np.minimum(1.0, launch_ms / predicted_ms)
    return doubt


def _as_gpu(gpu: str | Gpu) -> Gpu:
    from stepscope.predict.other_gpu.gpu import find_gpu

    return find_gpu(gpu) if isinstance(gpu, str) else gpu


def find_operator(op: str) -> ModelledOperator:
    operators = _operators()
    if op in operators:
        return operators[op]
    from difflib import get_close_matches

    near = get_close_matches(op, list(operators), 3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"retime: there is no operator {op!r}. {hint}Known are {', '.join(operators)}")


@cache
def _operators() -> dict[str, ModelledOperator]:
    operators = {
        "linear": ModelledOperator("linear", 4, _linear),
        "bmm": ModelledOperator("bmm", 4, _bmm),
        "softmax": ModelledOperator("softmax", 2, _softmax),
        "ln": ModelledOperator("norm", 2, _norm),
        "norm": ModelledOperator("norm", 2, _norm),
        "conv": ModelledOperator("conv", 7, _convolution),
        "attention": ModelledOperator("attention", 5, _attention),
    }
    for op, tensors in _TENSORS.items():
        operators[op] = ModelledOperator("elementwise", 2, _moving(tensors))
    return operators


def _linear(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit) -> Floats:
    return _product(shapes, dtype, gpu, fit, "linear" if unit_of(dtype) == "fp32" else "tensor")


def _bmm(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit) -> Floats:
    kind = bmm_kind(gpu.row) if unit_of(dtype) == "fp32" else "tensor"
    return _product(shapes, dtype, gpu, fit, kind)


def bmm_kind(row: GpuRow) -> str:
    """Since Ampere, NVIDIA's library runs batched fp32 products on one size of tile."""
    return "bmm" if row.generation in _ONE_TILE else "bmm before ampere"


def _product(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit, kind: str) -> Floats:
    return kernel_time.product_ms(shapes, _rate(dtype, gpu), gpu, fit.products[kind], fit)


def _rate(dtype: str, gpu: Gpu) -> kernel_time.DtypeRate:
    return kernel_time.DtypeRate(gpu.rates[dtype], gpu.full_rate(dtype), PEAK_BYTES[dtype])


def _convolution(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit) -> Floats:
    del fit
    rate, size = gpu.slowed_rate(dtype, _CONVOLUTION_POWER), PEAK_BYTES[dtype]
    return kernel_time.convolution_ms(shapes, rate=rate, element_bytes=size, gpu=gpu)


def _attention(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit) -> Floats:
    return kernel_time.attention_ms(shapes, _rate(dtype, gpu), gpu, fit.attention)


def _softmax(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit) -> Floats:
    return _rows(shapes, dtype, gpu, fit, softmax=True)


def _norm(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit) -> Floats:
    return _rows(shapes, dtype, gpu, fit, softmax=False)


def _rows(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit, *, softmax: bool) -> Floats:
    size = PEAK_BYTES[dtype]
    return kernel_time.rows_ms(*shapes.T, element_bytes=size, softmax=softmax, gpu=gpu, fit=fit)


def _moving(tensors: float) -> KernelModel:
    def model(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit) -> Floats:
        moved = shapes[:, 0] * shapes[:, 1] * PEAK_BYTES[dtype] * tensors
        return kernel_time.moved_ms(moved, gpu, fit)

    return model
