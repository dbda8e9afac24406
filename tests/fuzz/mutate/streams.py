"""Traces whose text or compressed stream is damaged, byte by byte or in blocks."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import TYPE_CHECKING

import zstandard

from fuzz.mutate.traces import seeds
from layouts import LAYOUTS, text_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    Way = Callable[[Random, bytes], bytes]

_FRAGMENTS = [
    *(b'"', b"'", b"\\", b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"\0", b"\t", b"\x07"),
    *(b'\\"', b"\\u", b"\\ud800", b"\\u0000", b"\\x", b'"}', b'"}]}', b"},{"),
    *(b"}]", b"]}", b"[[", b"/*"),
    *(b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x98", b"\x80"),
    *(b"\xef\xbb\xbf",),
    *(b"NaN", b"-Infinity", b"nan(ind)", b"1e999", b"-0", b"01", b"0x1f", b"1.", b".5", b"+1"),
    *(b"null",),
    *(b"true", b'"traceEvents": [', b'"traceEvents": 5,', b'{"ph": "X"}', b'"ph": "X"', b"9" * 400),
    *(b"9" * 5000, b"-" * 300, b"[" * 900, b"[" * 3000, b'{"a":' * 2000, b"]" * 50, b"}" * 50),
    *(b'"' * 31,),
    *(b'"name": "' + b"n" * 70_000 + b'", ', b"x" * 9000, b" " * 9000, b",,,,", b'"ts": 1e300,'),
    *(b'"args": {"Input Dims": ' + b"[[1]," * 700, b'"args": ' + b"[" * 1200 + b"]" * 1200 + b","),
]  # fmt: skip
_KEYS = (b'"ph"', b'"cat"', b'"name"', b'"pid"', b'"tid"', b'"ts"', b'"dur"', b'"args"', b'"id"')
_DEEP = [
    b"[" * 990 + b"1" + b"]" * 990,
    b'{"a":' * 600 + b"1" + b"}" * 600,
    b"[" * 5000 + b"]" * 5000,
]
_ENCODINGS = (
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
    "utf-8-sig",
    "latin-1",
    "utf-7",
    "cp1252",
)


def mutate(rng: Random, folder: Path) -> Path:
    # The same events as any writer puts them down; short, so that damage meets something.
    trace = json.loads(rng.choice(seeds()))
    events = trace.pop("traceEvents")
    size = rng.choice((1, 3, 20, 100, 400))
    first = rng.randrange(max(1, len(events) - size))
    layout = rng.choice((*LAYOUTS, "kineto", "minified"))
    text = text_of(events[first : first + size], layout, head=trace)
    if rng.random() < 0.75:
        for _ in range(rng.choice((1, 1, 2, 3, 8))):
            text = rng.choice(_TEXT_WAYS)(rng, text)
    if rng.random() < 0.5:
        text = _compressed(rng, text)
    path = folder / rng.choice(("trace.json", "trace.json.gz", "trace.pt.trace.json.gz", "t.json"))
    path.write_bytes(text)
    return path


def _place(rng: Random, text: bytes) -> int:
    """Anywhere, or where something begins or ends."""
    if rng.random() < 0.5 or not text:
        return rng.randrange(len(text) + 1)
    token = rng.choice((b'"', b"{", b"}", b"[", b"]", b",", b":", b"traceEvents", b"args", b"\\"))
    at = text.find(token, rng.randrange(len(text)))
    return max(0, at) + rng.choice((0, len(token)))


def _cut(rng: Random, text: bytes) -> bytes:
    at = _place(rng, text)
    return text[:at] if rng.random() < 0.7 else text[at:]


def _delete(rng: Random, text: bytes) -> bytes:
    at = _place(rng, text)
    return text[:at] + text[at + rng.choice((1, 1, 1, 2, 7, 60, 400, 5000)) :]


def _insert(rng: Random, text: bytes) -> bytes:
    at = _place(rng, text)
    return text[:at] + rng.choice(_FRAGMENTS) + text[at:]


def _insert_often(rng: Random, text: bytes) -> bytes:
    fragment = rng.choice([each for each in _FRAGMENTS if len(each) < 10])
    for _ in range(rng.randrange(2, 60)):
        at = _place(rng, text)
        text = text[:at] + fragment + text[at:]
    return text


def _repeat(rng: Random, text: bytes) -> bytes:
    at = _place(rng, text)
    size = rng.choice((1, 2, 30, 300, 3000))
    return text[: at + size] + text[at : at + size] * rng.choice((1, 2, 9)) + text[at + size :]


def _swap(rng: Random, text: bytes) -> bytes:
    low, high = sorted((_place(rng, text), _place(rng, text)))
    size = min(rng.choice((1, 4, 50)), high - low)
    low_part, high_part = text[low : low + size], text[high : high + size]
    return text[:low] + high_part + text[low + size : high] + low_part + text[high + size :]


def _flip(rng: Random, text: bytes) -> bytes:
    data = bytearray(text or b"\0")
    for _ in range(rng.choice((1, 1, 2, 20, 200))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _noise(rng: Random, text: bytes) -> bytes:
    at, size = _place(rng, text), rng.choice((1, 4, 64, 2000))
    return text[:at] + rng.choice((rng.randbytes(size), bytes(size))) + text[at + size :]


def _duplicate_key(rng: Random, text: bytes) -> bytes:
    """A second value for a key that is there, in many places at once."""
    key = rng.choice(_KEYS)
    value = rng.choice((b"1", b'"x"', b"null", b"[]", b"{}", b"-1", b"1e400", rng.choice(_DEEP)))
    return text.replace(key, key + b": " + value + b", " + key, rng.choice((1, 5, -1)))


def _deep(rng: Random, text: bytes) -> bytes:
    """A value replaced by one that is nested too deeply for most readers."""
    at = text.find(b":", _place(rng, text)) + 1
    until = text.find(b",", at)
    return text[:at] + rng.choice(_DEEP) + text[until if until > at else at :]


def _digits(rng: Random, text: bytes) -> bytes:
    """Digits of a number, in quotes or not, thousands of times."""
    at = _place(rng, text)
    while at < len(text) and not text[at : at + 1].isdigit():
        at += 1
    return (
        text[:at] + rng.choice((b"7", b"0", b"1.")) * rng.choice((30, 400, 4301, 9000)) + text[at:]
    )


def _encode(rng: Random, text: bytes) -> bytes:
    return text.decode("utf-8", "replace").encode(rng.choice(_ENCODINGS), "replace")


def _lines(rng: Random, text: bytes) -> bytes:
    return text.replace(rng.choice((b"\n", b" ", b",")), rng.choice((b"\r\n", b"\r", b"", b"\n\n")))


def _twice(rng: Random, text: bytes) -> bytes:
    return text + rng.choice((b"", b"\n", b",", b"\0" * 700)) + rng.choice((text, b"", b"}", b"[]"))


def _quotes(rng: Random, text: bytes) -> bytes:
    old, new = rng.choice(((b'"', b"'"), (b'\\"', b'"'), (b'":', b'"'), (b"},", b"}"), (b"}", b"")))
    return text.replace(old, new, rng.choice((1, 3, -1)))


def _long(rng: Random, text: bytes) -> bytes:
    """One value far longer than any name."""
    at = text.find(b'": "', _place(rng, text))
    filling = rng.choice((b"x", b"}, {", b"\xe2\x98\x83", b"\\\\", b'\\"', b" ", b"[1], "))
    return (
        text[: at + 4] + filling * (rng.choice((70_000, 400_000)) // len(filling)) + text[at + 4 :]
    )


_TEXT_WAYS: list[Way] = [
    *(_cut, _delete, _insert, _insert_often, _repeat, _swap, _flip, _noise, _duplicate_key),
    *(_deep, _digits, _encode, _lines, _twice, _quotes, _long, _insert, _delete),
]


def _compressed(rng: Random, text: bytes) -> bytes:
    stream = rng.choice(_STREAMS)(rng, text)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        stream = rng.choice(_STREAM_WAYS)(rng, stream)
    return stream


def _parts(rng: Random, text: bytes) -> list[bytes]:
    count = rng.choice((2, 3, 40))
    size = len(text) // count + 1
    return [text[at : at + size] for at in range(0, len(text) + 1, size)]


def _members(rng: Random, text: bytes) -> bytes:
    return b"".join(map(gzip.compress, _parts(rng, text)))


def _frames(rng: Random, text: bytes) -> bytes:
    skippable = bytes([0x50 + rng.randrange(16)]) + b"\x2a\x4d\x18\x03\0\0\0abc"
    between = rng.choice((b"", skippable, zstandard.compress(b"")))
    return between.join([b"", *map(zstandard.compress, _parts(rng, text)), b""])


def _checked_frame(rng: Random, text: bytes) -> bytes:
    packer = zstandard.ZstdCompressor(
        level=rng.choice((1, 3, 9)),
        write_checksum=rng.random() < 0.5,
        write_content_size=rng.random() < 0.5,
    )
    return packer.compress(text)


def _flushed(rng: Random, text: bytes) -> bytes:
    """Blocks that end early, as a writer leaves them who flushes after each line."""
    packer = zlib.compressobj(wbits=rng.choice((31, 31, 15, -15)))
    kind = rng.choice((zlib.Z_SYNC_FLUSH, zlib.Z_FULL_FLUSH))
    blocks = [packer.compress(part) + packer.flush(kind) for part in _parts(rng, text)]
    return b"".join(blocks) + rng.choice((packer.flush(), b""))


_STREAMS: list[Way] = [
    lambda _, text: gzip.compress(text),
    lambda rng, text: gzip.compress(text, compresslevel=rng.choice((0, 1, 9))),
    lambda _, text: gzip.compress(gzip.compress(text)),
    lambda _, text: zstandard.compress(gzip.compress(text)),
    *(_members, _frames, _checked_frame, _flushed),
]


def _header(rng: Random, stream: bytes) -> bytes:
    """Flags and sizes in the first bytes that promise what does not follow."""
    data = bytearray(stream[:18].ljust(18, b"\0"))
    data[rng.randrange(2, 18)] = rng.randrange(256)
    return bytes(data) + stream[18:]


def _trailer(rng: Random, stream: bytes) -> bytes:
    return stream[:-8] + rng.choice((b"", rng.randbytes(8), stream[-8:-4], bytes(8)))


def _padded(rng: Random, stream: bytes) -> bytes:
    tails = (b"\0" * 900, b"\x1f", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"words", stream[:40], stream)
    return stream + rng.choice(tails) if rng.random() < 0.8 else rng.choice(tails) + stream


_STREAM_WAYS: list[Way] = [
    *(_cut, _flip, _flip, _delete, _noise, _repeat, _swap, _header, _trailer, _padded),
]
