"""bucket-mb=N: DDP's bucket_cap_mb, in MiB. It sets how many gradients are summed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict.declaration import (
    NothingToChange,
    Outcome,
    parse_positive,
)
from stepscope.text.figures import size

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses a step that exchanges nothing, unknown sizes of gradients, and a limit that leaves
    all gradients in the one bucket they are in."""
    from stepscope.predict.scale_out import find_present_exchange, replan

    limit_mb = parse_positive("bucket-mb", value, "a number of MiB, such as bucket-mb=10")
    traced = find_present_exchange(context)
    buckets = traced.buckets if traced else None
    if buckets is not None and len(buckets) == 1:
        total_bytes = int(buckets.size_bytes.sum())
        if total_bytes <= limit_mb * (1 << 20):
            raise NothingToChange(
                f"bucket-mb={value}: all gradients ({size(total_bytes)}) are in one bucket already"
            )
    return replan(context, bucket_mb=limit_mb)
