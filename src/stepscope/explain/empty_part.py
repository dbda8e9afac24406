"""A rank's part of the job where no trace shows its calls and steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from stepscope.records.job import CollectiveCalls, RankPart, RankSteps

_NONE: Any = np.zeros(0, np.int64)
_CALLS = CollectiveCalls(**dict.fromkeys(CollectiveCalls.__struct_fields__, _NONE) | {"groups": ()})
_PACE = RankSteps(**dict.fromkeys(RankSteps.__struct_fields__, _NONE))


def empty_part(**known: Any) -> RankPart:
    """All such parts share their empty columns."""
    return RankPart(calls=_CALLS, pace=_PACE, **known)
