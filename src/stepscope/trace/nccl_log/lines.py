"""Recognise NCCL's lines in each of its versions, split a file into lines, and find the
files that are logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepscope.errors import UnreadableInputError
from stepscope.trace.files import ByteSource

_LONGEST_LINE_BYTES = 64 << 10
_LONGEST_HOST_BYTES = 255
_LONGEST_TEXT_BYTES = 4 << 10  # NCCL itself cuts at 1 KiB
SEARCHED_BYTES = 8 << 10


def _text(pattern: str) -> re.Pattern[str]:
    """`#` is a number of up to nine digits, `@` of up to eighteen: longer ones are damage."""
    return re.compile(_numbers(pattern), re.ASCII)


def _bytes(pattern: str) -> re.Pattern[bytes]:
    return re.compile(_numbers(pattern).encode(), re.DOTALL)


def _numbers(pattern: str) -> str:
    return pattern.replace("#", r"\d{1,9}").replace("@", r"\d{1,18}")


ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = _bytes(  # after the host, so that the search is fast
    r":(@):(@) \[(-?#)\] (?:(\S+?:#)(?: \([^()]{0,255}\))? |[\d.]+ \S+ )?"
    r"NCCL (INFO|WARN|TRACE)(?: (.*))?"
)
_NO_HOST = re.compile(rb"[\s:]")
CALL_MARK = b": opCount "
CALL = _bytes(
    r"(\w+): opCount ([0-9a-f]{1,16}) sendbuff \S{1,64} recvbuff \S{1,64} count (@) datatype (#) "
    r"op (-?@) root (-?#) comm (\S{1,64}) \[nranks=(#)\] stream (\S{1,64})"
)
CHOICE_MARK = b" Bytes -> "
CHOICE = _text(
    r"(?:(\w+): )?(@) Bytes -> Algo (\w+) proto (\w+)"
    r"(?: time [\d.]+| channel\{Lo\.\.Hi\}=\{(#)\.\.(#)\})"
)
OWN_KERNEL = _text(
    r"(\w+) \[(Symmetric|Copy Engine|Hierarchical CE)\]: (@) Bytes -> (?:Kernel )?(.+?)"
    r"(?: nchannels (#) nthreads #.*)?$"
)
VERSION = _text(r"([NR]CCL) version ?:? ?(\d\S*)")
_RCCL_TAIL = r"(?: comm (\S{1,64}) nRanks #.*)?$"
LINK = _text(
    r"Channel (#)(?:/#)? : (#)\[\w+\] -> (#)\[\w+\](?: \[(send|receive)\])? via (.+?)" + _RCCL_TAIL
)
COLLNET = _text(r"CollNet (#)(?:/#)? : (#) \[(?:send|receive)\] via (.+?)" + _RCCL_TAIL)
NET = _text(r"(?:NET|COLLNET)/(.+?)/#")
RING = _text(r"Ring (#) : (-?#) -> -?# -> (-?#)" + _RCCL_TAIL)
TREES = _text(r"Trees( \[.*?)" + _RCCL_TAIL)
TREE = _text(r"\[(-?#)\] (-?#(?:/-?#){0,7})->-?#->(-?#)")
ORDER = _text(r"Channel #/(#) ?:[\d\s]*$")
COUNTS = _text(
    r"(#) coll channels, (?:# collnet channels, )?(?:(#) nvls channels, )?"
    r"(#) p2p channels, (#) p2p channels per peer"
)
INIT = _text(
    r"(?:\[Rank #\] )?(?:\w{1,64} )?comm (\S{1,64}) rank (#) nranks (#) cudaDev (#)"
    r"(?: nvmlDev #)? busId (\w{1,32})"
    r"(?: parent (\S{1,64})(?: (?:split|child)Count (#))? color (-?@) key -?@)?"
    r"(?: commId (\S{1,64}))?.*?- (Init START|Init COMPLETE|\w{1,64} COMPLETE)"
)
NODES = _text(r"comm (\S{1,64}) rank (#) nRanks (#) nNodes (#) localRanks (#)\b")
ENV = _text(r"([NR]CCL_\w+) set (?:by environment )?to (.*)$")
PLUGIN_ENV = _text(r"NET/\S+ .*?Setting (NCCL_\w+)(?: environment variable)? to (.*)$")
WORDS = _text(
    r"Using network (?P<network>.+)$|Assigned NET plugin (?P<network_>.+) to comm$|"
    r"NET/Plugin ?: Loaded net plugin (?P<plugin>.+?)(?: \(v#\))?$|"
    r"TUNER/Plugin: Using (?:tuner plugin )?(?P<tuner>.+?)(?: \(v#\))?$|"
    r"Using tuner plugin: '(?P<tuner_>.+)'$"
)
ADAPTERS = _text(
    r"NET/IB ?: Using (?P<adapters>.*?); OOB|NET/OFI Selected [Pp]rovider is (?P<provider>.+)$"
)
SOCKETS = _text(r"(?:NET/Socket|Bootstrap) ?: Using (?P<sockets>.*)$")
LISTED = _text(r"(?:\[#\])?([^\s\[\]]+:\S+)")
FACT = _text(
    r"NET/IB ?: No device found|Failed to (?:initialize NET plugin|open libibverbs)|"
    r"P2P is disabled|NVLS multicast support|MNNVL |cudaDriverVersion|=== System|"
    r".*GPU Direct RDMA (?:Dis|En)abled|Connected all rings, use|"
    r"NET/Plugin ?:.*(?:returned|Could not find|No plugin)"
)
PLAIN = _text(r"Connected (?:all|NVLS)|Init timings|Bootstrap timings")  # read, not kept


class OddLineError(Exception):
    """A line whose numbers NCCL cannot have meant."""


class Prefixed(NamedTuple):
    """A line of NCCL's, split into its prefix and its text."""

    host: bytes
    pid: bytes
    thread: bytes
    device: bytes
    source: bytes
    level: bytes
    text: bytes


def split_prefix(line: bytes) -> Prefixed | None:
    """host:pid:thread [device] NCCL INFO, wherever in the line it begins."""
    match = _PREFIX.search(line, 0, SEARCHED_BYTES)
    while match is not None:
        start = match.start()
        before = line[max(0, start - _LONGEST_HOST_BYTES) : start]
        if host := _NO_HOST.split(before)[-1]:
            pid, thread, device, source, level, text = match.groups(b"")
            return Prefixed(host, pid, thread, device, source, level, text[:_LONGEST_TEXT_BYTES])
        match = _PREFIX.search(line, start + 1, SEARCHED_BYTES)
    return None


def split_lines(source: Iterable[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    """Number, text, and whether the line is complete. A progress bar's carriage returns split a
    line into parts that share its number. Of an endless line only the beginning is read."""
    rest = b""
    number = 0
    endless = False  # the rest of this line is skipped
    for piece in source:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            number += 1
            for part in _parts(line, endless):
                yield number, part, True
            endless = False
        if len(rest) > _LONGEST_LINE_BYTES:
            divided = b"\r" in rest
            *parts, rest = _parts(rest, endless) or [b""]
            for part in parts:
                yield number + 1, part, True
            endless = endless and not divided
            if len(rest) > _LONGEST_LINE_BYTES:
                yield number + 1, rest[:_LONGEST_LINE_BYTES], False
                rest, endless = b"", True
    *parts, rest = _parts(rest, endless) or [b""]
    for part in parts:
        yield number + 1, part, True
    if rest:
        yield number + 1, rest, False


def _parts(line: bytes, endless: bool) -> list[bytes]:
    return line.split(b"\r")[1 if endless else 0 :]


def to_text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


# Which files in a folder are NCCL logs.

_ENDINGS = (".log", ".txt", ".out", ".err", ".log.gz", ".log.zst", ".txt.gz")


def find_nccl_logs(path: str | Path) -> list[Path]:
    """The logs in a folder; for a file, the file itself.

    In a folder a file counts when its first half megabyte has a line of NCCL's.
    """
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise UnreadableInputError(f"{path} does not exist")
        return [path]
    try:
        files = [*path.iterdir(), *path.glob("rank-*/*")]
    except PermissionError as error:
        raise UnreadableInputError(f"{error.filename}: no permission to read it") from None
    return sorted(
        file for file in files if file.is_file() and is_log_name(file.name) and is_nccl_log(file)
    )


def is_log_name(name: str) -> bool:
    """Whether a file may be one of NCCL's logs."""
    name = name.lower()
    return name.startswith(("nccl", "rccl")) or name.endswith(_ENDINGS)


def is_nccl_log(file: Path) -> bool:
    try:
        head = next(iter(ByteSource(file)), b"")
    except UnreadableInputError:
        return False
    lines = (ANSI.sub(b"", line) for line in head.split(b"\n") if b"CCL" in line)
    return any(map(split_prefix, lines))
