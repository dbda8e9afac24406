"""Masks that eager code leaves out after a look at them, and compiled code cannot.

Libraries ask the device whether a mask masks anything, and call attention without one if not, for
causal attention with its flag alone. A compiler cannot ask: there the question disappears, the mask
is passed, and causal attention computes the half that it would skip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.replay.graph import CallKind, Phase
from stepscope.explain.work import rows_named
from stepscope.predict.by_text import by_text
from stepscope.predict.kernels import Family
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags
    from stepscope.predict.step_context import StepContext

_QUESTION = "aten::is_nonzero"
_ATTENTION = "aten::scaled_dot_product_attention"
_MASK, _CAUSAL = 3, 5  # arguments of attention
_PRODUCTS = (Family.MATMUL, Family.CONVOLUTION, Family.ATTENTION)
# Half of the square, and the blocks on the diagonal as a whole: 1.8 to 2.2 on an H200 for lengths
# of 512 and 1024.
MASKED_LONGER = 1.9


def find_mask_checks(context: StepContext) -> Flags:
    """Calls of forward that wait for the answer about a tensor of the device, before the first
    product: what is asked is about inputs."""
    host, calls, tasks = context.trace.host, context.graph.calls, context.graph.tasks
    operators = host.kind == HostKind.OPERATOR
    questions = rows_named(context.trace, host, operators, _QUESTION.__eq__)
    asks = nearest_of(host, questions, calls.row) >= 0
    asks &= (calls.kind == CallKind.WAIT) & (calls.phase == Phase.FORWARD)
    products = tasks.call[np.isin(context.operators.family, _PRODUCTS)]
    if len(products):
        asks &= np.arange(len(calls)) < products.min()
    found: Flags = asks
    return found


def find_causal_attention(context: StepContext) -> Flags:
    """Tasks of attention that is causal by its flag, without a mask, in both passes."""
    return _find_attention(context, causal=True)


def find_plain_attention(context: StepContext) -> Flags:
    """The same for attention to everything."""
    return _find_attention(context, causal=False)


def _find_attention(context: StepContext, *, causal: bool) -> Flags:
    trace, graph = context.trace, context.graph
    host, calls = trace.host, graph.calls
    operators = host.kind == HostKind.OPERATOR
    attention = rows_named(trace, host, operators, _ATTENTION.__eq__)
    rows = np.flatnonzero(attention)
    wanted = by_text(trace, host.concrete, rows, _is_causal, False) == causal
    wanted &= ~by_text(trace, host.shapes, rows, _has_mask, False)
    attention[rows[~wanted]] = False
    created_by = np.where(
        calls.operator >= 0, host.forward_of[np.maximum(calls.operator, 0)], np.int32(-1)
    )
    inside = nearest_of(host, attention, calls.row) >= 0
    inside |= nearest_of(host, attention, created_by) >= 0
    found: Flags = inside[graph.tasks.call] & (context.operators.family == Family.ATTENTION)
    return found


def _is_causal(concrete: str) -> bool:
    values = msgspec.json.decode(concrete)
    return len(values) > _CAUSAL and values[_CAUSAL] == "True"


def _has_mask(shapes: str) -> bool:
    given = msgspec.json.decode(shapes)
    return len(given) > _MASK and bool(given[_MASK])
