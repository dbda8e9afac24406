"""The bytes of a trace file, in pieces, whatever it is compressed with.

A compressed file that ends early gives what it has and says so in `ended_early`: the rest of the
reader then treats the text like any other cut file.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from stepscope.errors import UnreadableInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Progress = Callable[[int, int], None]  # bytes of the file read so far, bytes in all

PIECE_BYTES = 1 << 20
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
SQLITE = b"SQLite format 3\x00"
_READ_BYTES = 128 << 10
_THREAD_FROM_BYTES = 256 << 10


def open_file(path: Path) -> IO[bytes]:
    """Open for reading, or say plainly why not."""
    try:
        if path.is_dir():
            raise UnreadableInputError(f"{path} is a folder, not a trace file")
        return path.open("rb")
    except FileNotFoundError:
        raise UnreadableInputError(f"{path} does not exist") from None
    except PermissionError:
        raise UnreadableInputError(f"{path}: no permission to read it") from None
    except OSError as error:
        raise UnreadableInputError(f"{path}: {error.strerror or error}") from None


def head_of(path: Path, size: int = 16) -> bytes:
    """The first bytes, to recognise a format by."""
    with open_file(path) as file:
        return file.read(size)


class ByteSource:
    """Iterate once over a file's decompressed bytes."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self.ended_early: str | None = None
        self._progress = progress

    def __iter__(self) -> Iterator[bytes]:
        with open_file(self.path) as file:
            total = self.path.stat().st_size
            head = file.read(4)
            file.seek(0)
            if head[:2] == GZIP:
                pieces = self._gunzip(file)
            elif head == ZSTD:
                pieces = self._unzstd(file)
            else:
                pieces = iter(lambda: file.read(PIECE_BYTES), b"")
            if head[:2] == GZIP and total >= _THREAD_FROM_BYTES:
                pieces = _one_ahead(pieces)
            for piece in pieces:
                if self._progress:
                    self._progress(file.tell(), total)
                yield piece

    def _gunzip(self, file: IO[bytes]) -> Iterator[bytes]:
        from isal import isal_zlib

        member: Any = isal_zlib.decompressobj(wbits=31)
        data = b""
        try:
            while True:
                data = data or file.read(_READ_BYTES)
                if not data:
                    break
                yield member.decompress(data, PIECE_BYTES)
                data = member.unconsumed_tail
                if member.eof:
                    data = member.unused_data.lstrip(b"\x00")
                    member = isal_zlib.decompressobj(wbits=31)
                    if not data:
                        data = file.read(_READ_BYTES)
                        if not data:
                            return
            self.ended_early = "the gzip stream ends early"
        except (isal_zlib.error, zlib.error) as error:
            self.ended_early = f"the gzip stream is damaged ({error})"

    def _unzstd(self, file: IO[bytes]) -> Iterator[bytes]:
        import zstandard

        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        try:
            while piece := reader.read(PIECE_BYTES):
                yield piece
        except zstandard.ZstdError as error:
            self.ended_early = f"the zstd stream is damaged ({error})"


def _one_ahead(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress the next piece in a thread while the caller works on this one."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(next, pieces, None)
        while (piece := ahead.result()) is not None:
            ahead = pool.submit(next, pieces, None)
            yield piece
