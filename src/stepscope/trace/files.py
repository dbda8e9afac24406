"""The bytes of a trace file, in pieces, whatever it is compressed with.

A compressed file that ends early or is damaged gives what it has and says so in `ended_early`: the
rest of the reader then treats the text like any other cut file.
"""

from __future__ import annotations

import os
import zlib
from typing import IO, TYPE_CHECKING, Any

from stepscope.trace.regular_files import open_file, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Progress = Callable[[int, int], None]  # bytes of the file read so far, bytes in all

PIECE_BYTES = 512 << 10
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
SQLITE = b"SQLite format 3\x00"
_READ_BYTES = 128 << 10
_SALVAGE_READ_BYTES = 4 << 10
_SALVAGE_STEP_BYTES = 64
_ZSTD_STEP_BYTES = 2 << 10  # its blocks may be a thousand times longer than their code


class ByteSource:
    """Iterate once over a file's decompressed bytes."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self.ended_early: str | None = None
        self._progress = progress

    def __iter__(self) -> Iterator[bytes]:
        with open_file(self.path) as file:
            try:
                total = os.fstat(file.fileno()).st_size
                for piece in self._pieces(file):
                    if self._progress:
                        self._progress(file.tell(), total)
                    yield piece
            except OSError as error:
                raise unreadable(self.path, error) from None

    def _pieces(self, file: IO[bytes]) -> Iterator[bytes]:
        head = file.read(4)
        file.seek(0)
        if head[:2] == GZIP:
            return self._gunzip(file)
        if head == ZSTD:
            return self._unzstd(file)
        return iter(lambda: file.read(PIECE_BYTES), b"")

    def _gunzip(self, file: IO[bytes]) -> Iterator[bytes]:
        from isal import isal_zlib

        failures: Any = (isal_zlib.error, zlib.error)  # isal's stub mistypes its own
        member: Any = isal_zlib.decompressobj(wbits=31)
        data, given = b"", 0
        try:
            while data := data or file.read(_READ_BYTES):
                piece = member.decompress(data, PIECE_BYTES)
                given += len(piece)
                yield piece
                data = member.unconsumed_tail
                if member.eof:
                    data = _next_member(file, member.unused_data)
                    if not data:
                        return
                    member = isal_zlib.decompressobj(wbits=31)
            self.ended_early = "the gzip stream ends early"
        except failures as error:
            self.ended_early = f"the gzip stream is damaged ({error})"
            yield from _salvage(file, given)

    def _unzstd(self, file: IO[bytes]) -> Iterator[bytes]:
        import zstandard

        frame: Any = None  # a new one for the next frame, made when there is data for it
        made: list[bytes] = []
        try:
            while data := file.read(_ZSTD_STEP_BYTES):
                while data:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    made.append(frame.decompress(data))
                    data = frame.unused_data
                    frame = None if frame.eof else frame
                if sum(map(len, made)) >= PIECE_BYTES:
                    yield b"".join(made)
                    made.clear()
            self.ended_early = "the zstd stream ends early" if frame else None
        except zstandard.ZstdError as error:
            self.ended_early = f"the zstd stream is damaged ({error})"
        yield b"".join(made)


def _next_member(file: IO[bytes], data: bytes) -> bytes:
    """What follows one gzip member, without the zeros that tapes and block devices pad with.

    Anything but another member is no part of the stream, as for gzip itself.
    """
    while not (data := data.lstrip(b"\x00")):
        data = file.read(_READ_BYTES)
        if not data:
            return b""
    if len(data) == 1:
        data += file.read(_READ_BYTES)
    return data if data.startswith(GZIP) else b""


def _salvage(file: IO[bytes], given: int) -> Iterator[bytes]:
    """The bytes between the last piece that was given and the damage.

    A decompressor that meets damage keeps what it made in that call to itself: go there again and
    then on in small steps, so that little is made in the last one.
    """
    file.seek(0)
    member = zlib.decompressobj(wbits=31)
    data = b""
    try:
        while data := data or file.read(_SALVAGE_READ_BYTES):
            piece = member.decompress(data, given or _SALVAGE_STEP_BYTES)
            data = member.unconsumed_tail
            if given:
                given -= len(piece)
            else:
                yield piece
            if member.eof:
                data = _next_member(file, member.unused_data)
                member = zlib.decompressobj(wbits=31)
    except zlib.error:
        return
