"""What numbers of others can mean at most: a value beyond was not measured by anybody.

Far above what is met, and low enough that sums of thousands stay exact in 64 bits.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

_YEAR_NS = 365 * 86_400 * 1_000_000_000
MOST_DURATION_NS = 10 * _YEAR_NS
MOST_STAMP_NS = 230 * _YEAR_NS  # of a clock that counts from 1970
MOST_BYTES = 1 << 50
MOST_RANKS = 1 << 24
MOST_MS = MOST_DURATION_NS / 1e6
MOST_UNIX_S = 253_402_300_799.0  # the end of the year 9999, the last that a calendar here has

DurationNs = Annotated[int, Meta(ge=0, le=MOST_DURATION_NS)]
SomeDurationNs = Annotated[int, Meta(ge=1, le=MOST_DURATION_NS)]
StampNs = Annotated[int, Meta(ge=0, le=MOST_STAMP_NS)]
Bytes = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
StepNumber = Annotated[int, Meta(ge=0, le=1 << 48)]
RankNumber = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Ranks = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Cores = Annotated[float, Meta(ge=0, le=1 << 20)]
Threads = Annotated[int, Meta(ge=0, le=1 << 20)]
Share = Annotated[float, Meta(ge=0, le=1)]
Ms = Annotated[float, Meta(ge=0, le=MOST_MS)]
SomeMs = Annotated[float, Meta(gt=0, le=MOST_MS)]
UnixS = Annotated[float, Meta(ge=0, le=MOST_UNIX_S)]
Rate = Annotated[float, Meta(gt=0, le=1e24)]  # a second
