"""How much of a trace's text is held at once: every limit on its size, with the reason.

Measured on real traces: an event has 200 to 1,200 bytes and seldom more than 100 kB (a call stack,
the shapes of a foreach operator); the keys around the events have a few kB; gzip makes the text 10
to 30 times smaller, zstd 20 to 100 times, even for one repeated kernel. Each limit is at least five
times larger, most are a hundred times larger. Everything below the limits is read in full.
"""

from __future__ import annotations

import os

import msgspec

from stepscope.errors import UsageError

EVENT_VARIABLE = "STEPSCOPE_MAX_EVENT_MB"
EXPANSION_VARIABLE = "STEPSCOPE_MAX_EXPANSION"
NAME_CHARACTERS = 1 << 16  # of a name, category, process or thread: longer ones are cut
MAX_HELD_ELEMENTS = 1 << 20  # of a list: each takes up to 100 bytes
ZSTD_WINDOW_BYTES = 1 << 27  # zstd's own limit, unless told otherwise


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that can be raised, and those that follow from them."""

    event_bytes: int = 16 << 20  # of one event: a longer one is skipped and counted
    expansion: int = 500  # bytes of text per byte of a compressed file
    expansion_from_bytes: int = 256 << 20  # of text: less does no harm, however it was compressed
    values: int = 1 << 20  # in the keys around the events: each takes up to 100 bytes
    damaged: int = 1 << 18  # events in a row that cannot be read: this is no trace

    @classmethod
    def chosen(cls) -> Limits:
        """The limits set by the environment, else the defaults."""
        default = cls()
        event_mb = _variable(EVENT_VARIABLE, default.event_bytes >> 20)
        return cls(
            event_bytes=event_mb << 20, expansion=_variable(EXPANSION_VARIABLE, default.expansion)
        )

    @property
    def large_bytes(self) -> int:
        """A longer event is read by itself; a longer argument is left out.

        Pieces of events, and what recovery holds, stay below it.
        """
        return self.event_bytes // 8

    @property
    def outside_bytes(self) -> int:
        """Of the keys before the events, and again of those after them."""
        return 2 * self.event_bytes

    @property
    def gap_bytes(self) -> int:
        """Of text without a single event: reading ends there."""
        return 8 * self.event_bytes

    @property
    def useless_from_bytes(self) -> int:
        """Text without a useful event must not expand too far from this size on."""
        return self.expansion_from_bytes // 32

    @property
    def raise_event(self) -> str:
        """The advice for anything refused because of `event_bytes`."""
        return f"{EVENT_VARIABLE} (now {max(1, self.event_bytes >> 20)}) raises the limit"


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 6 and int(text)):
        raise UsageError(f"{name} is {text[:40]!r}: give a whole number from 1 to 999999")
    return int(text)
