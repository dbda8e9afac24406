"""Matrix products in tf32 or 16 bits with unaligned rows: Inductor pads them where that pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.flops import DTYPES
from stepscope.explain.replay.graph import Phase
from stepscope.predict.kernels import ALIGNED_BYTES, Family, copy_ns, roofline_ns
from stepscope.predict.product_alignment import find_alignment
from stepscope.predict.without_gradients import find_before_training

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, Floats
    from stepscope.predict.step_context import StepContext

_NARROW = tuple(DTYPES.index(name) for name in ("bf16", "fp16"))
_TF32 = (DTYPES.index("tf32"),)
_NARROW_PEAK, _TF32_PEAK = "bf16", "tf32"  # that of fp16 is the same as bf16's
_NARROW_BYTES, _TF32_BYTES = 2, 4  # of an element


def pad_products(context: StepContext, dur_ns: Floats) -> Floats:
    """As aligned products take, and what they move once more, if that is shorter."""
    operators = context.operators
    narrow = np.isin(operators.dtype, _NARROW)
    if context.memory_change.autocast:
        narrow |= ~find_before_training(context)
    moved = np.where(np.isin(operators.dtype, _NARROW), 1.0, 0.5) * operators.bytes_moved.clip(0)
    padded = _pad(context, dur_ns, narrow, moved, _NARROW_PEAK, _NARROW_BYTES)
    tf32 = np.isin(operators.dtype, _TF32) & ~narrow
    return _pad(context, padded, tf32, operators.bytes_moved.clip(0), _TF32_PEAK, _TF32_BYTES)


def _pad(
    context: StepContext,
    dur_ns: Floats,
    chosen: Flags,
    moved: Floats,
    peak: str,
    item_bytes: int,
) -> Floats:
    operators, ceilings = context.operators, context.ceilings
    product = (operators.family == Family.MATMUL) & (operators.flops > 0) & chosen
    if ceilings is None or peak not in ceilings.flops or not product.any():
        return dur_ns
    unaligned = product & (find_alignment(context, item_bytes) < ALIGNED_BYTES)
    padded = dur_ns.copy()
    backward = context.task_phase == Phase.BACKWARD
    for in_backward in (False, True):
        mine = unaligned & (backward == in_backward)
        whole = roofline_ns(
            Family.MATMUL,
            operators.flops[mine],
            moved[mine],
            peak,
            ceilings,
            backward=in_backward,
        ) + copy_ns(moved[mine], ceilings)
        padded[mine] = np.minimum(dur_ns[mine], whole * operators.share[mine])
    return padded
