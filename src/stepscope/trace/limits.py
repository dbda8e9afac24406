"""How much of a trace's text is held at once: all limits on its size, and why they lie there.

Real traces were measured: an event has 200 to 1,200 bytes and seldom more than 100 KB (a call
stack, the shapes of a foreach operator); the keys around the events have some KB; gzip makes the
text 10 to 30 times smaller, zstd 20 to 100 times, one kernel repeated included. Each limit leaves
at least a factor of five to that, most leave a hundred. What stays below them is read in full.
"""

from __future__ import annotations

import os

import msgspec

from stepscope.errors import UsageError

EVENT_VARIABLE = "STEPSCOPE_MAX_EVENT_MB"
EXPANSION_VARIABLE = "STEPSCOPE_MAX_EXPANSION"
NAME_CHARACTERS = 1 << 16  # of a name, category, process or thread: longer ones are kept cut
MAX_HELD_ELEMENTS = 1 << 20  # of a list: each takes up to 100 bytes
ZSTD_WINDOW_BYTES = 1 << 27  # what zstd itself refuses to go beyond unless told to


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that can be raised, and those that follow from them."""

    event_bytes: int = 16 << 20  # of one event: a longer one is passed over and counted
    expansion: int = 500  # bytes of text for each byte of a compressed file
    expansion_from_bytes: int = 256 << 20  # of text: whatever makes less of it does no harm
    values: int = 1 << 20  # in the keys around the events: each takes up to 100 bytes
    damaged: int = 1 << 18  # events in a row that cannot be read: nobody wrote a trace there

    @classmethod
    def chosen(cls) -> Limits:
        """As the environment says, else the usual ones."""
        usual = cls()
        event_mb = _variable(EVENT_VARIABLE, usual.event_bytes >> 20)
        return cls(
            event_bytes=event_mb << 20,
            expansion=_variable(EXPANSION_VARIABLE, usual.expansion),
        )

    @property
    def large_bytes(self) -> int:
        """Of an event that is read by itself; also of one of its arguments, which is then left out.

        Pieces of events stay below it, and so does what recovery holds.
        """
        return self.event_bytes // 8

    @property
    def outside_bytes(self) -> int:
        """Of the keys before the events, and of those after them."""
        return 2 * self.event_bytes

    @property
    def gap_bytes(self) -> int:
        """Of text without one event: nothing is expected after it."""
        return 8 * self.event_bytes

    @property
    def useless_from_bytes(self) -> int:
        """The same for text without one event that says something: repeated, it is soon refused."""
        return self.expansion_from_bytes // 32

    @property
    def raise_event(self) -> str:
        """The advice for what is refused because of `event_bytes`."""
        return f"{EVENT_VARIABLE} (now {max(1, self.event_bytes >> 20)}) raises the limit"


def megabytes(size: int) -> str:
    """For messages: `33 MB`."""
    return f"{size / 1e6:,.0f} MB" if size >= 1_000_000 else f"{size:,} bytes"


def _variable(name: str, usual: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return usual
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 6 and int(text)):
        raise UsageError(f"{name} is {text[:40]!r}: give a whole number from 1 to 999999")
    return int(text)
