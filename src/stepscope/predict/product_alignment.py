"""How the rows of a product's matrices lie in memory.

Tensor cores are fed 16 bytes at a time. A vocabulary of 50,257 makes rows of 100,514 bytes: every
second one starts at an odd multiple of two, and a library falls back to kernels that read two bytes
at a time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from stepscope.predict.by_text import by_text, tensor_shapes
from stepscope.predict.kernels import ALIGNED_BYTES, Family

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Ints
    from stepscope.predict.step_context import StepContext


def find_alignment(context: StepContext, item_bytes: int) -> Ints:
    """Bytes that every row of each product starts at a multiple of, at most 16; 16 for what is no
    matrix product."""
    operators, host = context.operators, context.trace.host
    rows = np.where(operators.family == Family.MATMUL, operators.row, -1)
    read = by_text(context.trace, host.strides, rows, read_row_length, 0.0)
    written = by_text(context.trace, host.shapes, rows, written_row_length, 0.0)
    common = np.gcd(read.astype(np.int64), written.astype(np.int64)) * item_bytes
    alignment: Ints = np.gcd(common, ALIGNED_BYTES).astype(np.int32)
    return alignment


def read_row_length(strides: str) -> float:
    """The largest common divisor of the operands' rows in elements; 0 if nothing is known."""
    rows = [steps[-2:] for steps in tensor_shapes(strides) if len(steps) >= 2]
    return float(math.gcd(*(max(pair) for pair in rows if min(pair) == 1)))


def written_row_length(shapes: str) -> float:
    """The last operand's columns are the result's."""
    matrices = [dims for dims in tensor_shapes(shapes) if len(dims) >= 2]
    return float(matrices[-1][-1]) if matrices else 0.0
