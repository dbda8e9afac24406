"""The keys of a trace outside its list of events: rank, devices, times, versions.

They are read without decoding the events, and a trace whose keys are damaged keeps its events.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.trace.decode import DECODE_ERRORS
from stepscope.trace.events import NOTHING
from stepscope.trace.json_brackets import SEARCH_BACK_BYTES

if TYPE_CHECKING:
    from stepscope.trace.limits import Limits

_LIST_END = lazy_pattern(rb"\}\s*+\](?=\s*(?:,|\}|\Z))")
_MAX_GUESSES = 256
_KNOWN_KEYS = ("schemaVersion", "distributedInfo", "deviceProperties", "baseTimeNanoseconds")


class OutsideKeys:
    """The keys before and after the events, and what of them could not be read."""

    def __init__(self, limits: Limits) -> None:
        self.keys: dict[str, Any] = {}
        self.lost: list[str] = []
        self.is_bare_list = False  # the file is a list of events without any key
        self._limits = limits

    def add_valid_head(self, head: bytes) -> bool:
        """Keep the keys before the events if they are valid as they stand."""
        keys = self.decode_object(head + b'"":0}')
        if keys is None:
            return False
        self._keep(keys)
        return True

    def read_head(self, head: bytes) -> None:
        """Keep the keys before the events, repaired if need be."""
        if not (self.add_valid_head(head) or self.add_valid_head(self._repaired(head))):
            self.lost.append("the keys before the events")

    def read_tail(self, tail: bytes) -> None:
        """Keep the keys after the events, repaired if need be."""
        keys = self._tail_keys(tail)
        if keys is None:
            keys = self._tail_keys(self._repaired(tail))
        if keys is None:
            self.lost.append("what follows the events")
        self._keep(keys or {})

    def find_list_end(self, text: bytes) -> int | None:
        """The bracket that closes the events: the earliest one that valid keys follow."""
        since = max(0, len(text) - SEARCH_BACK_BYTES)
        guesses = [match.end() - 1 for match in _LIST_END.finditer(text, since)]
        earliest = None
        for guess in reversed(guesses[-_MAX_GUESSES:]):
            if self._tail_keys(text[guess + 1 :]) is not None:
                earliest = guess
        return earliest

    def decode_object(self, text: bytes) -> dict[str, Any] | None:
        """The text as one object, or None if it is not one."""
        limit = self._limits.values
        try:
            if _max_values(text) <= limit:
                return msgspec.json.decode(text, type=dict[str, Any])
            known = _decode_known_keys(text, limit)
        except DECODE_ERRORS:
            return None
        lost = f"all but the best known keys around the events (over {limit:,} values)"
        if lost not in self.lost:
            self.lost.append(lost)
        return known

    def _tail_keys(self, tail: bytes) -> dict[str, Any] | None:
        tail = tail.strip()
        if self.is_bare_list:
            return {} if not tail else None
        if tail == b"}":
            return {}
        return self.decode_object(b'{"":0' + tail) if tail.startswith(b",") else None

    def _keep(self, keys: dict[str, Any]) -> None:
        keys.pop("", None)
        if keys.pop("traceEvents", None):
            self.lost.append("another list of events (the key is there twice)")
        self.keys |= keys

    def _repaired(self, text: bytes) -> bytes:
        from stepscope.trace.repair_json import repair

        return repair(text) if len(text) <= self._limits.event_bytes else text


def _decode_known_keys(text: bytes, max_values: int) -> dict[str, Any]:
    """The keys that stepscope uses; no other is decoded."""
    row = msgspec.json.decode(text, type=_known_keys_type())
    raws = {key: getattr(row, key) for key in _KNOWN_KEYS}
    return {
        key: msgspec.json.decode(raw)
        for key, raw in raws.items()
        if raw and _max_values(bytes(raw)) <= max_values
    }


@cache
def _known_keys_type() -> Any:
    return msgspec.defstruct("KnownKeys", [(key, msgspec.Raw, NOTHING) for key in _KNOWN_KEYS])


def _max_values(text: bytes) -> int:
    """An upper bound of the values in JSON text."""
    return sum(map(text.count, (b",", b"[", b"{"))) + 1
