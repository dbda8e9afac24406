"""What the host did in the eager passes: operators that it ran, and branches on their results.

An eager trace has all operators, views among them. The host's time per operator shows how fast it
runs PyTorch's code, whatever the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.replay.graph import Phase
from stepscope.explain.work import rows_named
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags
    from stepscope.predict.step_context import StepContext

_BRANCH = "aten::is_nonzero"


class EagerOperators(msgspec.Struct, frozen=True, kw_only=True):
    """Of the forward and the backward pass."""

    operators: int
    # Python asks whether a tensor of the host is true, and a compiler cannot know the answer.
    # Questions about the device's tensors stay out: they are mostly checks of a library's, which
    # leaves them out when it is compiled.
    branches: int


def count_operators(context: StepContext) -> EagerOperators:
    """Between the first and the last traced call of both passes."""
    host, calls = context.trace.host, context.graph.calls
    passes = (calls.phase == Phase.FORWARD) | (calls.phase == Phase.BACKWARD)
    rows = calls.row[passes & (calls.row >= 0)]
    if not len(rows):
        return EagerOperators(operators=0, branches=0)
    start = host.start_ns[rows]
    inside: Flags = (host.kind == HostKind.OPERATOR) & np.isin(host.thread, host.thread[rows])
    inside &= (host.start_ns >= start.min()) & (host.start_ns <= start.max())
    branch = rows_named(context.trace, host, inside, _BRANCH.__eq__)
    on_device = nearest_of(host, branch, calls.row[calls.row >= 0])
    branch[on_device[on_device >= 0]] = False
    return EagerOperators(operators=int(inside.sum()), branches=int(branch.sum()))
