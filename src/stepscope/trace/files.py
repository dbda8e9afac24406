"""The bytes of a trace file, in pieces, whatever it is compressed with.

A compressed file that ends early or is damaged gives what it has and says so in `ended_early`: the
rest of the reader then treats the text like any other cut file.
"""

from __future__ import annotations

import os
import re
import zlib
from typing import IO, TYPE_CHECKING, Any

from stepscope.errors import UnreadableInputError
from stepscope.trace.limits import EXPANSION_VARIABLE, ZSTD_WINDOW_BYTES, Limits, megabytes
from stepscope.trace.regular_files import open_file, unreadable_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Progress = Callable[[int, int], None]  # bytes of the file read so far, bytes in all

PIECE_BYTES = 512 << 10
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a zstd frame that holds no text
SQLITE = b"SQLite format 3\x00"
_READ_BYTES = 128 << 10
_SALVAGE_READ_BYTES = 4 << 10
_SALVAGE_STEP_BYTES = 64
_FIRST_READ_BYTES = 4 << 10  # of a member, as what a tiny one does not need is copied
_ZSTD_STEP_BYTES = 2 << 10  # its blocks may be a thousand times longer than their code
_ZSTD_SMALL_STEP_BYTES = 64  # once they were


def has_holes(path: Path) -> bool:
    """Whether the file is longer than what was ever written to it."""
    with open_file(path) as file:
        try:
            return os.lseek(file.fileno(), 0, os.SEEK_HOLE) < os.fstat(file.fileno()).st_size
        except (OSError, AttributeError):  # not every system or disk can tell
            return False


class ByteSource:
    """Iterate once over a file's decompressed bytes, in pieces of PIECE_BYTES at most.

    Raises UnreadableInputError where a small file makes more text than `limits` allow.
    """

    def __init__(
        self, path: Path, progress: Progress | None = None, limits: Limits | None = None
    ) -> None:
        self.path = path
        self.ended_early: str | None = None
        self.text_bytes = 0  # given so far
        self.file_bytes = 0  # that these were made of
        self._ahead_bytes = 0  # read from the file and not yet decompressed
        self._progress = progress
        self.limits = limits or Limits.chosen()

    def __iter__(self) -> Iterator[bytes]:
        with open_file(self.path) as file:
            try:
                total = os.fstat(file.fileno()).st_size
                for piece in _joined(self._pieces(file)):
                    self.file_bytes = file.tell() - self._ahead_bytes
                    if self._progress:
                        self._progress(file.tell(), total)
                    self.text_bytes += len(piece)
                    if self.text_bytes > self.limits.expansion_from_bytes:
                        self.check_expansion(self.text_bytes, self.file_bytes)
                    yield piece
            except OSError as error:
                raise unreadable_error(self.path, error) from None

    def check_expansion(self, text_bytes: int, file_bytes: int) -> None:
        """Refuse a stretch of the file that makes far more text than any trace does."""
        if text_bytes > self.limits.expansion * max(1, file_bytes):
            raise UnreadableInputError(
                f"{self.path} is refused at byte {self.text_bytes} of its text: "
                f"{megabytes(text_bytes)} were made of {megabytes(file_bytes)} in the file, over "
                f"{self.limits.expansion} times as much, which no usual trace does; "
                f"if it is one, set {EXPANSION_VARIABLE} above {self.limits.expansion}, or "
                "decompress it first"
            )

    def _pieces(self, file: IO[bytes]) -> Iterator[bytes]:
        head = file.read(4)
        file.seek(0)
        if head[:2] == GZIP:
            return self._gunzip(file)
        if head == ZSTD or SKIPPABLE.fullmatch(head):
            return self._unzstd(file)
        return iter(lambda: file.read(PIECE_BYTES), b"")

    def _gunzip(self, file: IO[bytes]) -> Iterator[bytes]:
        from isal import isal_zlib

        failures: Any = (isal_zlib.error, zlib.error)  # isal's stub mistypes its own
        member: Any = isal_zlib.decompressobj(wbits=31)
        data, given, step = b"", 0, _FIRST_READ_BYTES
        try:
            while data := data or file.read(step):
                step = min(2 * step, _READ_BYTES)
                piece = member.decompress(data, PIECE_BYTES)
                given += len(piece)
                data = member.unconsumed_tail
                self._ahead_bytes = len(data)
                yield piece
                if member.eof:
                    data, step = _next_member(file, member.unused_data), _FIRST_READ_BYTES
                    if not data:
                        return
                    member = isal_zlib.decompressobj(wbits=31)
            self.ended_early = "the gzip stream ends early"
        except failures as error:
            self.ended_early = f"the gzip stream is damaged ({error})"
            yield from _salvage(file, given)

    def _unzstd(self, file: IO[bytes]) -> Iterator[bytes]:
        import zstandard

        reader = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
        frame: Any = None  # a new one for the next frame, made when there is data for it
        made: list[bytes] = []
        step = _ZSTD_STEP_BYTES
        try:
            while data := file.read(step):
                while data:
                    frame = frame or reader.decompressobj()
                    made.append(frame.decompress(data))
                    data = frame.unused_data
                    frame = None if frame.eof else frame
                size = sum(map(len, made))
                step = _ZSTD_STEP_BYTES if size <= PIECE_BYTES else _ZSTD_SMALL_STEP_BYTES
                if size >= PIECE_BYTES:
                    yield from _in_pieces(made)
            self.ended_early = "the zstd stream ends early" if frame else None
        except zstandard.ZstdError as error:
            self.ended_early = _zstd_failure(error)
        yield from _in_pieces(made)


def _zstd_failure(error: Exception) -> str:
    if "too much memory" in str(error):
        return (
            f"a zstd frame needs a window of over {ZSTD_WINDOW_BYTES >> 20} MB: decompress it "
            "first with `zstd -d --long=31`"
        )
    return f"the zstd stream is damaged ({error})"


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Thousands of tiny members are no more pieces than one large one."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        if piece:
            held.append(piece)
            size += len(piece)
        if size >= PIECE_BYTES // 8:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _in_pieces(made: list[bytes]) -> Iterator[bytes]:
    """Empty the list, piece by piece: few bytes of zstd may make many."""
    text = b"".join(made)
    made.clear()
    if len(text) <= 2 * PIECE_BYTES:
        yield text
    else:
        yield from (text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES))


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
    left = PIECE_BYTES  # more cannot lie there
    file.seek(0)
    member = zlib.decompressobj(wbits=31)
    data = b""
    try:
        while left > 0 and (data := data or file.read(_SALVAGE_READ_BYTES)):
            piece = member.decompress(data, given or _SALVAGE_STEP_BYTES)
            data = member.unconsumed_tail
            if given:
                given -= len(piece)
            else:
                left -= len(piece)
                yield piece
            if member.eof:
                data = _next_member(file, member.unused_data)
                member = zlib.decompressobj(wbits=31)
    except zlib.error:
        return
