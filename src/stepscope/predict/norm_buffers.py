"""Running statistics of batch norms, which DDP sends from rank 0 before every forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.predict.buckets import rows_in_step
from stepscope.predict.by_text import by_text

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

_NORM = "aten::batch_norm"
_MEAN = 3  # input, weight, bias, running mean, running variance


class NormBuffers(msgspec.Struct, frozen=True, kw_only=True):
    """Two fp32 vectors and a counter per batch norm."""

    norms: int
    size_bytes: int

    @property
    def tensors(self) -> int:
        return 3 * self.norms

    @property
    def messages_bytes(self) -> tuple[int, int]:
        """Two: DDP flattens all tensors of one type into one message."""
        return self.size_bytes, 8 * self.norms


def find_norm_buffers(context: StepContext) -> NormBuffers | None:
    """None for a step without batch norms that keep statistics."""
    rows = rows_in_step(context, (_NORM,))
    channels = by_text(context.trace, context.trace.host.shapes, rows, _channels, 0.0)
    norms = int(np.count_nonzero(channels))
    return NormBuffers(norms=norms, size_bytes=8 * int(channels.sum())) if norms else None


def _channels(shapes: str) -> float:
    mean = msgspec.json.decode(shapes)[_MEAN : _MEAN + 1]
    return float(mean[0][0]) if mean and len(mean[0]) == 1 else 0.0
