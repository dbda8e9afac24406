"""The only way to open files that others wrote: regular files only, and within a limit.

A pipe would wait for its writer for ever, /dev/zero never ends, and a file under /proc may do both
and still call itself regular. So a file is checked before it is opened and again once it is open,
when nobody can exchange it any more; reading never waits; whoever reads a whole file sets a limit.
Every failure is an UnreadableInputError that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from typing import IO, TYPE_CHECKING, NamedTuple

from stepscope.errors import UnreadableInputError
from stepscope.records import figures

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_FILE_BYTES = 8 << 20  # of a file that is held whole
MAX_LINE_BYTES = 1 << 20
MAX_LINES = 250_000
MAX_LINES_BYTES = 128 << 20
_PIECE_BYTES = 256 << 10
_ENDLESS = 8  # times the longest line: text this long has no lines
_BUFFER_BYTES = 128 << 10
# Do not wait for the other end of a pipe; do not pass the file on to child processes.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class MissingFileError(UnreadableInputError):
    """There is no such file: its content was not captured."""


def open_file(path: Path) -> IO[bytes]:
    """Open for reading, or say plainly why not."""
    try:
        _require_regular(path, path.stat().st_mode)
        return io.BufferedReader(_NeverWaits(_opened(path, os.O_RDONLY)), _BUFFER_BYTES)
    except (OSError, ValueError) as error:
        raise unreadable_error(path, error) from None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """The open file; what fails while it is read is said as plainly."""
    with open_file(path) as file:
        try:
            yield file
        except OSError as error:
            raise unreadable_error(path, error) from None


def open_to_append(path: Path) -> int:
    """A descriptor to read and append with; a missing file is created."""
    with contextlib.suppress(FileNotFoundError):
        _require_regular(path, path.stat().st_mode)
    return _opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)


def read_head(path: Path) -> bytes:
    """The first bytes, to recognise a format by."""
    return read_start(path, 16)


def read_tail(path: Path, size: int) -> bytes:
    with reading(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size)


def read_start(path: Path, size: int) -> bytes:
    """The first `size` bytes, or all there are."""
    with reading(path) as file:
        return file.read(size)


def read_whole(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """All of a file; one larger than the limit is refused."""
    content = read_start(path, max_bytes + 1)
    if len(content) > max_bytes:
        raise UnreadableInputError(
            f"{path} is larger than {figures.binary_size(max_bytes)}, the limit for such a file"
        )
    return content


class FileLine(NamedTuple):
    """One line without its end."""

    number: int
    text: bytes
    ended: bool  # False for a last line that its writer may not have finished


class LineFile:
    """The lines of a file within limits. What is left out is known once they were read."""

    def __init__(
        self,
        path: Path,
        *,
        max_lines: int = MAX_LINES,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_bytes: int = MAX_LINES_BYTES,
    ) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.max_lines, self.max_line_bytes = max_lines, max_line_bytes
        self.too_long = 0  # lines that were left out
        self.is_cut = False  # the rest was not read

    def __iter__(self) -> Iterator[FileLine]:
        left = self.max_lines
        for line in self._lines():
            if not left:
                self.is_cut = True
                return
            left -= 1
            yield line

    def _lines(self) -> Iterator[FileLine]:
        """All lines but blank ones, up to a line without end."""
        number, rest, skipped = 0, b"", 0
        for piece in self._pieces():
            *whole, rest = (rest + piece).split(b"\n")
            for text in whole:
                number += 1
                if skipped or len(text) > self.max_line_bytes:
                    self.too_long, skipped = self.too_long + 1, 0
                elif text.strip():
                    yield FileLine(number, text, True)
            if len(rest) > self.max_line_bytes:
                rest, skipped = b"", skipped + len(rest)
            if skipped > _ENDLESS * self.max_line_bytes:
                self.is_cut = True
                break
        if skipped:
            self.too_long += 1
        elif rest.strip() and not self.is_cut:
            yield FileLine(number + 1, rest, False)

    def _pieces(self) -> Iterator[bytes]:
        left = self.max_bytes
        with reading(self.path) as file:
            while left > 0 and (piece := file.read(min(_PIECE_BYTES, left))):
                left -= len(piece)
                yield piece
            self.is_cut = left <= 0 and file.read(1) != b""


def is_folder(path: Path) -> bool:
    """False for a missing path and for a link that leads to itself. Raises UnreadableInputError if
    it cannot be checked."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            return False
        raise unreadable_error(path, error) from None


def may_exist(path: Path) -> bool:
    """False only for a missing path: if it cannot be checked, opening it will say why."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def list_folder(folder: Path) -> list[Path]:
    """The paths in a folder, sorted by name."""
    try:
        return sorted(folder.iterdir())
    except (OSError, ValueError) as error:
        raise unreadable_error(folder, error) from None


def unreadable_error(path: Path, error: OSError | ValueError) -> UnreadableInputError:
    """The failure in words: the name, the permissions, the disk or the network."""
    if isinstance(error, FileNotFoundError):
        return MissingFileError(f"{path} does not exist")
    if isinstance(error, PermissionError):
        return UnreadableInputError(f"{path}: no permission to read it")
    if isinstance(error, BlockingIOError):
        return UnreadableInputError(f"{path} is not a regular file: it has nothing to read now")
    if isinstance(error, OSError):
        return UnreadableInputError(f"{path}: {error.strerror or error}")
    return UnreadableInputError(f"{str(path)!r}: {error}")  # no file can have this name


class _NeverWaits(io.FileIO):
    """Files under /proc may answer "not now", which Python's buffers take for the end."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "rb")

    def readinto(self, buffer: object) -> int:
        count = super().readinto(buffer)  # type: ignore[arg-type]
        if count is None:
            raise BlockingIOError
        return count

    def readall(self) -> bytes:
        content: bytes | None = super().readall()
        if content is None:
            raise BlockingIOError
        return content


def _opened(path: Path, flags: int) -> int:
    """A descriptor of a regular file, checked on the file that was really opened."""
    descriptor = os.open(path, flags | _FLAGS, 0o644)
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise UnreadableInputError(f"{path} is a folder, not a file")
    if not stat.S_ISREG(mode):
        raise UnreadableInputError(f"{path} is not a regular file: save its content to one")
