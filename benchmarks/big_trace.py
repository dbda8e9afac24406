"""A trace of any size, made by repeating a real one end to end.

Every repeat is shifted to follow the one before. Ids that must be unique in a trace (correlation,
external and flow ids, sequence numbers, Python frames, step numbers) are shifted too, so the result
is a valid longer recording of the same training. The same input gives the same bytes.

    python big_trace.py SOURCE TARGET [--bytes N]
"""

from __future__ import annotations

import argparse
import gzip
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

GIGABYTE = 1_000_000_000
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[\s*')
_BETWEEN = re.compile(rb"(?<=\})\s*,\s*(?=\{\s*\"(?:ph|name|cat|pid|ts|id)\")")
_END = re.compile(rb"\s*\](?=\s*(?:,\s*\"\w+\"\s*:|\}\s*\Z))")
_ONCE = re.compile(rb'"ph": "M"|"cat": "Trace"|"s": "g"')
_TIMES = re.compile(rb'"(ts|dur)": (\d+(?:\.\d+)?)')
# A correlation or external id of zero means none: it stays.
_IDS = (
    rb'"External id": (?!0\b)|"correlation": (?!0\b)|"Sequence number": |"Ev Idx": |"Python id": '
    rb'|"Python parent id": |"wait_on_cuda_event_record_corr_id": |"id": |ProfilerStep#'
)
_SLOTS = re.compile(rb'("ts": )(\d+(?:\.\d+)?)|(' + _IDS + rb")(\d+)")
_PAUSE_NS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Text with holes: `text[i]` precedes number `i`, which grows by `stride[i]` per repeat."""

    text: list[bytes]
    numbers: list[int]
    strides: list[int]
    is_time: list[bool]

    def filled(self, repeat: int) -> bytes:
        moved = [
            number + repeat * stride
            for number, stride in zip(self.numbers, self.strides, strict=True)
        ]
        values = [
            b"%d.%03d" % divmod(number, 1000) if time else b"%d" % number
            for number, time in zip(moved, self.is_time, strict=True)
        ]
        parts = [part for pair in zip(self.text, values, strict=False) for part in pair]
        return b"".join((*parts, self.text[-1]))


def repeated(source: bytes, at_least_bytes: int) -> Iterator[bytes]:
    """The text of the long trace, in parts."""
    head, events, tail = split(source)
    once = [event for event in events if _ONCE.search(event)]
    body = b",\n  ".join(event for event in events if not _ONCE.search(event))
    period_ns = _extent_ns(body) + _PAUSE_NS
    template = make_template(body, period_ns)
    repeats = max(1, -(-at_least_bytes // len(body)))
    yield head
    for repeat in range(repeats):
        yield template.filled(repeat) + b",\n  "
    last_ns = (repeats - 1) * period_ns
    yield b",\n  ".join(_stretched(event, last_ns) for event in once)
    yield tail


def split(source: bytes) -> tuple[bytes, list[bytes], bytes]:
    """The text before the events, the events, the text after them."""
    begin = _EVENTS.search(source)
    if begin is None:
        raise SystemExit("no traceEvents in the source")
    end = list(_END.finditer(source, source.rindex(b"}", 0, source.rindex(b"]"))))[-1]
    events = _BETWEEN.split(source[begin.end() : end.start()])
    return source[: begin.end()], events, source[end.start() :]


def make_template(body: bytes, period_ns: int) -> Template:
    """Cut the text at every number that must be shifted."""
    ids: dict[bytes, list[int]] = {}
    text, numbers, kinds = [], [], []
    position = 0
    for match in _SLOTS.finditer(body):
        is_time = match[1] is not None
        text.append(body[position : match.start(2 if is_time else 4)])
        number = to_ns(match[2]) if is_time else int(match[4])
        kinds.append(b"" if is_time else match[3])
        if not is_time:
            ids.setdefault(match[3], []).append(number)
        numbers.append(number)
        position = match.end()
    text.append(body[position:])
    strides = _strides(ids) | {b"": period_ns}
    return Template(
        text=text,
        numbers=numbers,
        strides=[strides[kind] for kind in kinds],
        is_time=[not kind for kind in kinds],
    )


def _strides(ids: dict[bytes, list[int]]) -> dict[bytes, int]:
    """How far each kind of id is shifted per repeat: past the largest; linked ids together."""
    strides = {kind: max(seen) - min(seen) + 1 for kind, seen in ids.items()}
    for joined in (
        (b'"External id": ', b'"correlation": ', b'"wait_on_cuda_event_record_corr_id": '),
        (b'"Python id": ', b'"Python parent id": '),
    ):
        here = [kind for kind in joined if kind in strides]
        most = max((max(ids[kind]) for kind in here), default=0) + 1
        strides |= dict.fromkeys(here, most)
    return strides


def to_ns(microseconds: bytes) -> int:
    """The text of a time, in µs with at most three decimals."""
    whole, _, fraction = microseconds.partition(b".")
    return int(whole) * 1000 + int(fraction.ljust(3, b"0")[:3])


def _extent_ns(body: bytes) -> int:
    first, last, start = None, 0, 0
    for key, value in _TIMES.findall(body):
        number = to_ns(value)
        start = number if key == b"ts" else start
        first = start if first is None else min(first, start)
        last = max(last, start if key == b"ts" else start + number)
    return last - (first or 0)


def _stretched(event: bytes, by_ns: int) -> bytes:
    """Extend the window's own span and end mark to the end of the last repeat."""

    def longer(match: re.Match[bytes]) -> bytes:
        return b'"%s": %d.%03d' % (match[1], *divmod(to_ns(match[2]) + by_ns, 1000))

    if b"Record Window End" in event:
        return _TIMES.sub(longer, event)
    if b'"cat": "Trace"' in event:
        return re.sub(rb'"(dur)": (\d+(?:\.\d+)?)', longer, event)
    return event


def read(path: Path) -> bytes:
    """The whole text of a plain or gzip file."""
    data = path.read_bytes()
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--bytes", type=int, default=GIGABYTE, help="at least this large")
    chosen = parser.parse_args()
    with chosen.target.open("wb") as file:
        for part in repeated(read(chosen.source), chosen.bytes):
            file.write(part)
    print(f"{chosen.target}: {chosen.target.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
