"""Running statistics of batch norms, which DDP sends from rank 0 before every forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.predict.buckets import rows_in_step

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
    host, strings = context.trace.host, context.trace.strings
    channels: dict[int, int] = {}
    sizes = []
    for code in host.shapes[rows_in_step(context, (_NORM,))].tolist():
        if code >= 0 and code not in channels:
            channels[code] = _channels(strings[code])
        sizes.append(channels.get(code, 0))
    with_statistics = [size for size in sizes if size]
    if not with_statistics:
        return None
    return NormBuffers(norms=len(with_statistics), size_bytes=8 * sum(with_statistics))


def _channels(shapes: str) -> int:
    try:
        dims: Any = msgspec.json.decode(shapes)
    except msgspec.DecodeError:
        return 0
    mean = dims[_MEAN] if len(dims) > _MEAN else []
    return int(mean[0]) if isinstance(mean, list) and len(mean) == 1 else 0
