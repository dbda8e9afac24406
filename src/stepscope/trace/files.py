"""The bytes of a trace file, in pieces, however it is compressed.

A compressed file that ends early or is damaged gives what it has and says so in `ended_early`; the
reader then treats its text like that of any other cut file.
"""

from __future__ import annotations

import os
import re
import zlib
from typing import IO, TYPE_CHECKING, Any

from stepscope.errors import UnreadableInputError
from stepscope.records import figures
from stepscope.trace.limits import EXPANSION_VARIABLE, ZSTD_WINDOW_BYTES, Limits
from stepscope.trace.regular_files import open_file, reading

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
_FIRST_READ_BYTES = 4 << 10  # of a gzip member: what follows a tiny one is copied
_ZSTD_STEP_BYTES = 2 << 10  # a block's text may be a thousand times longer
_ZSTD_SMALL_STEP_BYTES = 64  # once it was


def has_holes(path: Path) -> bool:
    with open_file(path) as file:
        try:
            return os.lseek(file.fileno(), 0, os.SEEK_HOLE) < os.fstat(file.fileno()).st_size
        except (OSError, AttributeError):  # not every system or disk knows
            return False


class ByteSource:
    """Iterate once over a file's decompressed bytes, in pieces of up to PIECE_BYTES.

    Raises UnreadableInputError if a small file expands to more text than `limits` allow.
    """

    def __init__(
        self, path: Path, progress: Progress | None = None, limits: Limits | None = None
    ) -> None:
        self.path = path
        self.ended_early: str | None = None
        self.text_bytes = 0  # handed out so far
        self.file_bytes = 0  # of the file, that this text came from
        self._ahead_bytes = 0  # read from the file and not yet decompressed
        self._progress = progress
        self.limits = limits or Limits.chosen()

    def __iter__(self) -> Iterator[bytes]:
        with reading(self.path) as file:
            total = os.fstat(file.fileno()).st_size
            for piece in _joined(self._pieces(file)):
                self.file_bytes = file.tell() - self._ahead_bytes
                if self._progress:
                    self._progress(file.tell(), total)
                self.text_bytes += len(piece)
                if self.text_bytes > self.limits.expansion_from_bytes:
                    self.check_expansion(self.text_bytes, self.file_bytes)
                yield piece

    def check_expansion(self, text_bytes: int, file_bytes: int) -> None:
        """Refuse a part of the file that expands to far more text than any trace does."""
        if text_bytes > self.limits.expansion * max(1, file_bytes):
            raise UnreadableInputError(
                f"{self.path} was not read beyond byte {self.text_bytes} of its text: "
                f"{figures.size(file_bytes)} of the file expand to {figures.size(text_bytes)}. "
                f"A usual trace expands at most {self.limits.expansion} times. If you trust the "
                f"file, set {EXPANSION_VARIABLE} above {self.limits.expansion} or decompress it "
                "first"
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
        data, produced, step = b"", 0, _FIRST_READ_BYTES
        try:
            while data := data or file.read(step):
                step = min(2 * step, _READ_BYTES)
                piece = member.decompress(data, PIECE_BYTES)
                produced += len(piece)
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
            yield from _salvage(file, produced)

    def _unzstd(self, file: IO[bytes]) -> Iterator[bytes]:
        import zstandard

        reader = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
        frame: Any = None  # the decoder of the current frame, made when there is data for it
        texts: list[bytes] = []
        step = _ZSTD_STEP_BYTES
        try:
            while data := file.read(step):
                while data:
                    frame = frame or reader.decompressobj()
                    texts.append(frame.decompress(data))
                    data = frame.unused_data
                    frame = None if frame.eof else frame
                size = sum(map(len, texts))
                step = _ZSTD_STEP_BYTES if size <= PIECE_BYTES else _ZSTD_SMALL_STEP_BYTES
                if size >= PIECE_BYTES:
                    yield from _take_pieces(texts)
            self.ended_early = "the zstd stream ends early" if frame else None
        except zstandard.ZstdError as error:
            self.ended_early = _zstd_failure(error)
        yield from _take_pieces(texts)


def _zstd_failure(error: Exception) -> str:
    if "too much memory" in str(error):
        return (
            f"a zstd frame needs a window of over {figures.size(ZSTD_WINDOW_BYTES)}: decompress it "
            "first with `zstd -d --long=31`"
        )
    return f"the zstd stream is damaged ({error})"


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Join the small pieces of thousands of tiny members."""
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


def _take_pieces(texts: list[bytes]) -> Iterator[bytes]:
    """Empty the list, piece by piece: a few bytes of zstd may expand to many."""
    text = b"".join(texts)
    texts.clear()
    if len(text) <= 2 * PIECE_BYTES:
        yield text
    else:
        yield from (text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES))


def _next_member(file: IO[bytes], data: bytes) -> bytes:
    """The next gzip member, after the zeros that tapes and block devices pad with.

    Like gzip itself, ignore anything that is not another member.
    """
    while not (data := data.lstrip(b"\x00")):
        data = file.read(_READ_BYTES)
        if not data:
            return b""
    if len(data) == 1:
        data += file.read(_READ_BYTES)
    return data if data.startswith(GZIP) else b""


def _salvage(file: IO[bytes], produced: int) -> Iterator[bytes]:
    """The bytes between the last piece and the damage.

    A decompressor that meets damage loses what it produced in that call: decompress up to there
    again, then on in small steps, so that the last one loses little.
    """
    left = PIECE_BYTES  # there cannot be more
    file.seek(0)
    member = zlib.decompressobj(wbits=31)
    data = b""
    try:
        while left > 0 and (data := data or file.read(_SALVAGE_READ_BYTES)):
            piece = member.decompress(data, produced or _SALVAGE_STEP_BYTES)
            data = member.unconsumed_tail
            if produced:
                produced -= len(piece)
            else:
                left -= len(piece)
                yield piece
            if member.eof:
                data = _next_member(file, member.unused_data)
                member = zlib.decompressobj(wbits=31)
    except zlib.error:
        return
