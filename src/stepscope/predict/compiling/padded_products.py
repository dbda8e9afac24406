"""Matrix products in 16 bits whose rows are unaligned: Inductor pads them where that pays."""

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

_ITEM_BYTES = 2
_NARROW = tuple(DTYPES.index(name) for name in ("bf16", "fp16"))
_NARROW_PEAK = "bf16"  # that of fp16 is the same


def pad_products(context: StepContext, dur_ns: Floats) -> Floats:
    """As aligned products take, and what they move once more, if that is shorter."""
    operators, ceilings = context.operators, context.ceilings
    unaligned = _find_unaligned(context)
    if ceilings is None or _NARROW_PEAK not in ceilings.flops or not unaligned.any():
        return dur_ns
    padded = dur_ns.copy()
    backward = context.task_phase == Phase.BACKWARD
    moved = np.where(np.isin(operators.dtype, _NARROW), 1.0, 0.5) * operators.bytes_moved.clip(0)
    for in_backward in (False, True):
        mine = unaligned & (backward == in_backward)
        whole = roofline_ns(
            Family.MATMUL,
            operators.flops[mine],
            moved[mine],
            _NARROW_PEAK,
            ceilings,
            backward=in_backward,
        ) + copy_ns(moved[mine], ceilings)
        padded[mine] = np.minimum(dur_ns[mine], whole * operators.share[mine])
    return padded


def _find_unaligned(context: StepContext) -> Flags:
    operators = context.operators
    narrow = np.isin(operators.dtype, _NARROW)
    if context.memory_change.autocast:
        narrow |= ~find_before_training(context)
    product = (operators.family == Family.MATMUL) & (operators.flops > 0)
    found: Flags = product & narrow & (find_alignment(context, _ITEM_BYTES) < ALIGNED_BYTES)
    return found
