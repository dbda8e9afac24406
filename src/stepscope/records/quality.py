"""What files may hold: the largest numbers that anybody can have measured, notes on what
could not be read, and JSON of text that UTF-8 cannot hold.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

# What could not be read from a file, in words and counts: nothing is lost silently.


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to know about the input. `id` is stable; `detail` is a sentence for people."""

    id: str
    detail: str
    count: int | None = None
    byte_offset: int | None = None


# The largest values that numbers in files can have: beyond them nobody has measured anything.
#
# The limits lie far above real values, and low enough that sums of thousands stay exact in 64 bits.

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


# Values as JSON, also with text that UTF-8 cannot hold, such as a file name of odd bytes.


def encode_json(value: Any) -> bytes:
    """Encode a record; every character that UTF-8 cannot hold becomes a question mark."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_replace_all(msgspec.to_builtins(value)))


def replace_invalid(text: str) -> str:
    """The text with a question mark for every character that UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


def _replace_all(value: Any) -> Any:
    if isinstance(value, str):
        return replace_invalid(value)
    if isinstance(value, dict):
        return {_replace_all(key): _replace_all(inner) for key, inner in value.items()}
    return [_replace_all(inner) for inner in value] if isinstance(value, list | tuple) else value
