"""What NCCL's lines look like, version by version, and how a file falls into lines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LONGEST_LINE_BYTES = 64 << 10
SEARCHED_BYTES = 8 << 10  # NCCL itself cuts at 1 KiB

ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
PREFIX = re.compile(
    rb"([^\s:]{1,255}):(\d+):(\d+) \[(-?\d+)\] "
    rb"(?:(\S+?:\d+)(?: \([^()]*\))? |[\d.]+ \S+ )?NCCL (INFO|WARN|TRACE)(?: (.*))?",
    re.DOTALL,
)
CALL_MARK = b": opCount "
CALL = re.compile(
    rb"(\w+): opCount ([0-9a-f]+) sendbuff \S+ recvbuff \S+ count (-?\d+) datatype (\d+) "
    rb"op (-?\d+) root (-?\d+) comm (\S+) \[nranks=(\d+)\] stream (\S+)"
)
CHOICE_MARK = b" Bytes -> "
CHOICE = re.compile(
    r"(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)"
    r"(?: time [\d.]+| channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})"
)
OWN_KERNEL = re.compile(
    r"(\w+) \[(Symmetric|Copy Engine|Hierarchical CE)\]: (\d+) Bytes -> (?:Kernel )?(.+?)"
    r"(?: nchannels (\d+) nthreads \d+.*)?$"
)
VERSION = re.compile(r"([NR]CCL) version ?:? ?(\d\S*)")
_RCCL_TAIL = r"(?: comm (\S+) nRanks \d+.*)?$"
LINK = re.compile(
    r"Channel (\d+)(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[(send|receive)\])? via (.+?)"
    + _RCCL_TAIL
)
COLLNET = re.compile(r"CollNet (\d+)(?:/\d+)? : (\d+) \[(?:send|receive)\] via (.+?)" + _RCCL_TAIL)
NET = re.compile(r"(?:NET|COLLNET)/(.+?)/\d+")
RING = re.compile(r"Ring (\d+) : (-?\d+) -> -?\d+ -> (-?\d+)" + _RCCL_TAIL)
TREES = re.compile(r"Trees( \[.*?)" + _RCCL_TAIL)
TREE = re.compile(r"\[(-?\d+)\] ([-\d/]+)->-?\d+->(-?\d+)")
ORDER = re.compile(r"Channel \d+/(\d+) ?:[\d\s]*$")
COUNTS = re.compile(
    r"(\d+) coll channels, (?:\d+ collnet channels, )?(?:(\d+) nvls channels, )?"
    r"(\d+) p2p channels, (\d+) p2p channels per peer"
)
INIT = re.compile(
    r"(?:\[Rank \d+\] )?(?:\w+ )?comm (\S+) rank (\d+) nranks (\d+) cudaDev (\d+)"
    r"(?: nvmlDev \d+)? busId (\w+)"
    r"(?: parent (\S+)(?: (?:split|child)Count (\d+))? color (-?\d+) key -?\d+)?"
    r"(?: commId (\S+))?.*?- (Init START|Init COMPLETE|\w+ COMPLETE)"
)
NODES = re.compile(r"comm (\S+) rank (\d+) nRanks (\d+) nNodes (\d+) localRanks (\d+)")
ENV = re.compile(r"([NR]CCL_\w+) set (?:by environment )?to (.*)$")
PLUGIN_ENV = re.compile(r"NET/\S+ .*?Setting (NCCL_\w+)(?: environment variable)? to (.*)$")
WORDS = re.compile(
    r"Using network (?P<network>.+)$|Assigned NET plugin (?P<network_>.+) to comm$|"
    r"NET/Plugin ?: Loaded net plugin (?P<plugin>.+?)(?: \(v\d+\))?$|"
    r"TUNER/Plugin: Using (?:tuner plugin )?(?P<tuner>.+?)(?: \(v\d+\))?$|"
    r"Using tuner plugin: '(?P<tuner_>.+)'$"
)
ADAPTERS = re.compile(
    r"NET/IB ?: Using (?P<adapters>.*?); OOB|NET/OFI Selected [Pp]rovider is (?P<provider>.+)$"
)
SOCKETS = re.compile(r"(?:NET/Socket|Bootstrap) ?: Using (?P<sockets>.*)$")
LISTED = re.compile(r"(?:\[\d+\])?([^\s\[\]]+:\S+)")
FACT = re.compile(
    r"NET/IB ?: No device found|Failed to (?:initialize NET plugin|open libibverbs)|"
    r"P2P is disabled|NVLS multicast support|MNNVL |cudaDriverVersion|=== System|"
    r".*GPU Direct RDMA (?:Dis|En)abled|Connected all rings, use|"
    r"NET/Plugin ?:.*(?:returned|Could not find|No plugin)"
)
PLAIN = re.compile(r"Connected (?:all|NVLS)|Init timings|Bootstrap timings")  # read, not kept


def lines_of(source: Iterable[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    """Number, text and whether its end was seen. A progress bar's carriage returns divide a line
    into parts that share its number."""
    rest = b""
    number = 0
    for piece in source:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            number += 1
            for part in line.split(b"\r") if b"\r" in line else (line,):
                yield number, part, True
        if len(rest) > _LONGEST_LINE_BYTES:
            number += 1
            yield number, rest, False
            rest = b""
    if rest:
        yield number + 1, rest, False


def text_of(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
