"""bucket-mb=N: DDP's bucket_cap_mb, in MiB: how many gradients are summed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict import scale_out
from stepscope.predict.outcome import Refused
from stepscope.predict.traced_exchange import find_traced
from stepscope.predict.values import parse_positive

if TYPE_CHECKING:
    from stepscope.predict.outcome import Outcome
    from stepscope.predict.step_context import StepContext

HELP = "DDP's bucket_cap_mb: gradients summed in buckets of N MiB (bucket-mb=25)"


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses where nothing is exchanged, without the gradients' sizes, and where all of them are
    in one bucket before and after."""
    size = parse_positive("bucket-mb", value, "a number of MiB, such as bucket-mb=10")
    traced = find_traced(context, context.bare or context.graph)
    buckets = traced.buckets if traced else None
    if buckets is not None and len(buckets) == 1 and buckets.size_bytes.sum() <= size * (1 << 20):
        total = f"{int(buckets.size_bytes.sum()):,} bytes"
        raise Refused(f"bucket-mb={value}: all gradients ({total}) are in one bucket already")
    return scale_out.replan(context, bucket_mb=size)
