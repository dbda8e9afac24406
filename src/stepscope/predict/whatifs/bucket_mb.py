"""bucket-mb=N: DDP's bucket_cap_mb, in MiB: how many gradients are summed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict import scale_out
from stepscope.predict.whatifs.factor import parse_positive

if TYPE_CHECKING:
    from stepscope.predict.scene import Scene
    from stepscope.predict.whatifs.outcome import Outcome

HELP = "DDP's bucket_cap_mb: gradients summed in buckets of N MiB (bucket-mb=25)"


def apply(scene: Scene, value: str) -> Outcome:
    """Refuses where nothing is exchanged, and without the gradients' sizes."""
    size = parse_positive("bucket-mb", value, "a number of MiB, such as bucket-mb=10")
    return scale_out.replan(scene, bucket_mb=size)
