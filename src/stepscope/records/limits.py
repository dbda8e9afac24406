"""The largest values that numbers in files can have: beyond them nobody has measured anything.

The limits lie far above real values, and low enough that sums of thousands stay exact in 64 bits.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

_YEAR_NS = 365 * 86_400 * 1_000_000_000
MAX_DURATION_NS = 10 * _YEAR_NS
MAX_STAMP_NS = 230 * _YEAR_NS  # of a clock that counts from 1970
MAX_BYTES = 1 << 50
# Of one event or device: half a million still add up within 64 bits; large machines hold 2**41.
MAX_EVENT_BYTES = 1 << 44
MAX_RANKS = 1 << 24
MAX_MS = MAX_DURATION_NS / 1e6
MAX_UNIX_S = 253_402_300_799.0  # the end of the year 9999, the last of Python's calendar

DurationNs = Annotated[int, Meta(ge=0, le=MAX_DURATION_NS)]
SomeDurationNs = Annotated[int, Meta(ge=1, le=MAX_DURATION_NS)]
StampNs = Annotated[int, Meta(ge=0, le=MAX_STAMP_NS)]
UnixOffsetNs = Annotated[int, Meta(ge=-MAX_STAMP_NS, le=MAX_STAMP_NS)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
StepNumber = Annotated[int, Meta(ge=0, le=1 << 48)]
RankNumber = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Cores = Annotated[float, Meta(ge=0, le=1 << 20)]
Threads = Annotated[int, Meta(ge=0, le=1 << 20)]
Share = Annotated[float, Meta(ge=0, le=1)]
Ms = Annotated[float, Meta(ge=0, le=MAX_MS)]
SomeMs = Annotated[float, Meta(gt=0, le=MAX_MS)]
UnixS = Annotated[float, Meta(ge=0, le=MAX_UNIX_S)]
Rate = Annotated[float, Meta(gt=0, le=1e24)]  # per second
