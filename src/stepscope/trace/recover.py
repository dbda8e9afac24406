"""Damaged pieces: keep every event that can be kept, count the rest, remember where.

In order, each step only for what the one before could not read: the piece as it is; the piece with
the profiler's known slips mended (bare nan and inf, stray backslashes, broken UTF-8); halves of
it, down to single events; a single event with unescaped quotes mended or odd types coerced.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from stepscope.records.trace import ABSENT
from stepscope.trace.events import NO_ARGS, Args, Event, ExactEvent
from stepscope.trace.text import EVENT_KEYS, boundaries

AnyEvent = TypeVar("AnyEvent", Event, ExactEvent)

_BARE_NUMBER = re.compile(
    rb"(?<=[:,\[\s])[-+]?(?:nan|inf|infinity|1\.#(?:inf|ind|qnan))(?=\s*[,\]}])", re.IGNORECASE
)
_STRAY_BACKSLASH = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_VALUE_WITH_QUOTES = re.compile(
    rb'(?P<open>"(?:name|cat)"\s*:\s*")(?P<value>.*?)(?P<close>"\s*(?:,\s*"'
    + EVENT_KEYS
    + rb'"\s*:|\}\s*\Z))',
    re.DOTALL,
)
_JOIN_AT_MOST = 4


@dataclass(slots=True)
class Losses:
    """What was wrong with a file's events, and where it began."""

    mended: int = 0
    unreadable: int = 0
    not_events: int = 0
    cut_at: int | None = None
    first_unreadable: int | None = None
    malformed: dict[str, int] = field(default_factory=dict)

    def lose(self, offset: int) -> None:
        self.unreadable += 1
        if self.first_unreadable is None:
            self.first_unreadable = offset

    def count(self, reason: str, rows: int = 1) -> None:
        if rows:
            self.malformed[reason] = self.malformed.get(reason, 0) + rows


def decode_list(decoder: msgspec.json.Decoder[list[AnyEvent]], text: bytes) -> list[AnyEvent]:
    """Decode comma-separated events."""
    return decoder.decode(b"[" + text + b"]")


def recover(
    decoder: msgspec.json.Decoder[list[AnyEvent]],
    kind: type[AnyEvent],
    text: bytes,
    offset: int,
    losses: Losses,
    *,
    cut: bool,
) -> list[AnyEvent]:
    """All events that can be had from a piece that did not decode. `cut`: the file ends here."""
    if not text.strip(b" \r\n\t,"):
        return []
    mended = _mend(text)
    events = _whole(decoder, kind, mended, losses)
    if events is not None:
        losses.mended += mended != text
        return events
    cuts = boundaries(mended)
    starts = [0, *(resume for _, resume in cuts)]
    ends = [*(end for end, _ in cuts), len(mended)]
    # Mending may have moved bytes: offsets behind it are exact only where it changed nothing.
    return _Bisection(decoder, kind, mended, offset, losses, starts, ends, cut=cut).run()


class _Bisection:
    """Decode ever smaller runs of events until what fails is a single one."""

    def __init__(
        self,
        decoder: msgspec.json.Decoder[Any],
        kind: type[Any],
        text: bytes,
        offset: int,
        losses: Losses,
        starts: list[int],
        ends: list[int],
        *,
        cut: bool,
    ) -> None:
        self.decoder, self.kind, self.text, self.offset = decoder, kind, text, offset
        self.losses, self.starts, self.ends, self.cut = losses, starts, ends, cut
        self.joined_until = 0

    def run(self) -> list[Any]:
        found: list[Any] = []
        pending = [(0, len(self.starts))]
        while pending:
            low, high = pending.pop()
            low = max(low, self.joined_until)
            if low >= high:
                continue
            text = self.text[self.starts[low] : self.ends[high - 1]]
            events = _whole(self.decoder, self.kind, text, self.losses)
            if events is not None:
                found.extend(events)
            elif high - low == 1:
                found.extend(self._single(low))
            else:
                middle = (low + high) // 2
                pending += [(middle, high), (low, middle)]
        return found

    def _single(self, row: int) -> list[Any]:
        text = self.text[self.starts[row] : self.ends[row]]
        if not text.strip(b" \r\n\t,]}"):
            return []
        events = _whole(self.decoder, self.kind, _escape_quotes(text), self.losses)
        if events is not None:
            self.losses.mended += 1
            return events
        for last in range(row + 1, min(row + _JOIN_AT_MOST, len(self.ends))):
            joined = self.text[self.starts[row] : self.ends[last]]
            events = _whole(self.decoder, self.kind, joined, self.losses)
            if events is not None:
                self.joined_until = last + 1
                return events
        if self.cut and row == len(self.starts) - 1:
            self.losses.cut_at = self.offset + self.starts[row]
        else:
            self.losses.lose(self.offset + self.starts[row])
        return []


def _whole(
    decoder: msgspec.json.Decoder[Any], kind: type[Any], text: bytes, losses: Losses
) -> list[Any] | None:
    try:
        return decode_list(decoder, text)
    except msgspec.ValidationError:
        return _coerce_all(kind, text, losses)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _mend(text: bytes) -> bytes:
    text = _BARE_NUMBER.sub(b"null", text)
    text = _STRAY_BACKSLASH.sub(rb"\\\\", text)
    text = _CONTROL.sub(b" ", text)
    return text.decode("utf-8", "replace").encode()


def _escape_quotes(text: bytes) -> bytes:
    def escape(match: re.Match[bytes]) -> bytes:
        value = re.sub(rb'(?<!\\)"', rb"\\\"", match["value"])
        return match["open"] + value + match["close"]

    return _VALUE_WITH_QUOTES.sub(escape, text)


def _coerce_all(kind: type[Any], text: bytes, losses: Losses) -> list[Any] | None:
    """Valid JSON whose types are not the expected ones: take what can be taken, event by event."""
    try:
        rows = msgspec.json.decode(b"[" + text + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    out = []
    for row in rows:
        if isinstance(row, dict):
            out.append(_coerce(kind, row))
        else:
            losses.not_events += 1
    return out


def _coerce(kind: type[Any], row: dict[str, Any]) -> Any:
    time = _number(row.get("ts"))
    if kind is ExactEvent:
        time = msgspec.Raw(msgspec.json.encode(time))
    raw_args = row.get("args")
    return kind(
        ph=_text(row.get("ph")),
        cat=_text(row.get("cat")),
        name=_text(row.get("name")),
        pid=_lane(row.get("pid")),
        tid=_lane(row.get("tid")),
        ts=time,
        dur=_number(row.get("dur")),
        id=_lane(row.get("id")),
        args=_coerce_args(raw_args) if isinstance(raw_args, dict) else NO_ARGS,
    )


def _coerce_args(row: dict[str, Any]) -> Args:
    return Args(
        **{
            info.name: msgspec.Raw(msgspec.json.encode(row[info.encode_name]))
            if info.type is msgspec.Raw
            else row[info.encode_name]
            for info in msgspec.structs.fields(Args)
            if info.encode_name in row
        }
    )


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        try:
            value = float(value) if not value.strip().lstrip("-").isdigit() else int(value)
        except ValueError:
            return None
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value if isinstance(value, int | float) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _lane(value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return ABSENT if value is None else str(value)
    return value
