"""Open files that others wrote: which names may be traces or side files, regular files only
and within a limit, and the bytes of a trace however it is compressed. Every failure is an
UnreadableInputError that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.records.folders import STEPS_FILE, part_number
from stepscope.records.memory import SAVING_FILE as SAVED_MEMORY
from stepscope.text import figures

Progress = Callable[[int, int], None]  # bytes read, bytes in all

# A pipe would wait for its writer for ever, /dev/zero never ends, and a file under /proc may do
# both and still call itself regular. So a file is checked before it is opened and again once it is
# open, when nobody can exchange it any more; reading never waits; whoever reads a whole file sets a
# limit. Every failure is an UnreadableInputError that names the file.

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
    """Return False for a missing path and for a link that leads to itself. Raises
    UnreadableInputError if it cannot be checked."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            return False
        raise unreadable_error(path, error) from None


def may_exist(path: Path) -> bool:
    """Return False only for a missing path: if it cannot be checked, opening it will say why."""
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


# The bytes of a trace file, in pieces, however it is compressed.
#
# A compressed file that ends early or is damaged gives what it has and says so in `ended_early`;
# the reader then treats its text like that of any other cut file.

PIECE_BYTES = 512 << 10
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a zstd frame that holds no text
SQLITE = b"SQLite format 3\x00"
# Protocols 2 and later begin with their number; the older ones with what JSON never begins with.
_PICKLE = re.compile(rb"\x80[\x02-\x08]|\([dl]|[}\]]q|c[\w.]+\n[\w.]+\n")
_READ_BYTES = 128 << 10
_SALVAGE_READ_BYTES = 4 << 10
_SALVAGE_STEP_BYTES = 64
_FIRST_READ_BYTES = 4 << 10  # of a gzip member: what follows a tiny one is copied
_ZSTD_STEP_BYTES = 2 << 10  # a block's text may be a thousand times longer
_ZSTD_SMALL_STEP_BYTES = 64  # once it was


def is_pickle(head: bytes) -> bool:
    """Whether a file's first bytes are those of a pickle."""
    return _PICKLE.match(head) is not None


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


# How much of a trace's text is held at once: every limit on its size, with the reason.
#
# Measured on real traces: an event has 200 to 1,200 bytes and seldom more than 100 kB (a call
# stack, the shapes of a foreach operator); the keys around the events have a few kB; gzip makes the
# text 10 to 30 times smaller, zstd 20 to 100 times, even for one repeated kernel. Each limit is at
# least five times larger, most are a hundred times larger. Everything below the limits is read in
# full.

EVENT_VARIABLE = "STEPSCOPE_MAX_EVENT_MB"
EXPANSION_VARIABLE = "STEPSCOPE_MAX_EXPANSION"
NAME_CHARACTERS = 1 << 16  # of a name, category, process or thread: longer ones are cut
MAX_HELD_ELEMENTS = 1 << 20  # of a list: each takes up to 100 bytes
ZSTD_WINDOW_BYTES = 1 << 27  # zstd's own limit, unless told otherwise


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that can be raised, and those that follow from them."""

    event_bytes: int = 16 << 20  # of one event: a longer one is skipped and counted
    expansion: int = 500  # bytes of text per byte of a compressed file
    expansion_from_bytes: int = 256 << 20  # of text: less does no harm, however it was compressed
    values: int = 1 << 20  # in the keys around the events: each takes up to 100 bytes
    damaged: int = 1 << 18  # events in a row that cannot be read: this is no trace

    @classmethod
    def chosen(cls) -> Limits:
        """The limits set by the environment, else the defaults."""
        default = cls()
        event_mb = _variable(EVENT_VARIABLE, default.event_bytes >> 20)
        return cls(
            event_bytes=event_mb << 20, expansion=_variable(EXPANSION_VARIABLE, default.expansion)
        )

    @property
    def large_bytes(self) -> int:
        """A longer event is read by itself; a longer argument is left out.

        Pieces of events, and what recovery holds, stay below it.
        """
        return self.event_bytes // 8

    @property
    def outside_bytes(self) -> int:
        """Limit the keys before the events, and again those after them."""
        return 2 * self.event_bytes

    @property
    def gap_bytes(self) -> int:
        """Limit text without a single event: reading ends there."""
        return 8 * self.event_bytes

    @property
    def useless_from_bytes(self) -> int:
        """Text without a useful event must not expand too far from this size on."""
        return self.expansion_from_bytes // 32

    @property
    def raise_event(self) -> str:
        """The advice for anything refused because of `event_bytes`."""
        return f"{EVENT_VARIABLE} (now {max(1, self.event_bytes >> 20)}) raises the limit"


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 6 and int(text)):
        raise UsageError(f"{name} is {text[:40]!r}: give a whole number from 1 to 999999")
    return int(text)


# Names in a folder of traces: which may be traces, and which lie next to one in a run folder.

ENDINGS = (".json", ".json.gz", ".json.zst", ".sqlite")
# The files that capture writes next to a rank's trace and `explain` reads; see is_side_file.
SIDE_FILES = (STEPS_FILE, "clock.json", "links.json", "rank.json", "comms.jsonl", "memory.json")
_MORE_SIDE_FILES = ("samples.json", "compiler.jsonl", "graphs.jsonl", SAVED_MEMORY)
# What else stepscope writes into its folders.
_OTHER_FILES = (
    *("run.json", "lines.json", "probe.json", "script.json", "trial.json", "losses.json"),
    *("window-request.json", "tune.json", "bench.json", "ab.json"),
)
_NOT_TRACES = frozenset((*SIDE_FILES, *_MORE_SIDE_FILES, *_OTHER_FILES))
_COLLECTIVES = re.compile(r"collectives-[^/]*\.json\.gz")


def is_trace_name(name: str) -> bool:
    return name.endswith(ENDINGS) and name not in _NOT_TRACES and not _is_part(name)


def is_side_file(name: str) -> bool:
    """Whether `explain` reads it next to a trace: one of SIDE_FILES, or a part of a long list."""
    return name in (*SIDE_FILES, *_MORE_SIDE_FILES) or _is_part(name)


def _is_part(name: str) -> bool:
    return part_number(name) is not None or _COLLECTIVES.fullmatch(name) is not None
