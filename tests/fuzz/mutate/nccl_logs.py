"""NCCL logs: numbers without end, mixed and cut lines, odd bytes, several jobs in one file."""

from __future__ import annotations

import gzip
import shutil
from functools import cache
from typing import TYPE_CHECKING

from fuzz.drive import ANSWERED, REFUSED, as_json
from shared_traces import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

_MOST_LINES = 400
_NUMBERS = (
    *(b"0", b"-1", b"00", b"1", b"4096", b"65536", b"2147483648", b"9223372036854775808"),
    *(b"9" * 18, b"9" * 19, b"9" * 40, b"9" * 5000, b"1e9", b"0x1f", b"", b"-", b"1.5", b"NaN"),
    *("²".encode(), "٣".encode(), b"+3", b"1_000"),
)
_BYTES = (
    *(b"\0", b"\xff\xfe", b"\x1b[31m", b"\x1b]8;;http://x\x07", b"\r", b"\n", b"\r\n", b"\t"),
    *("\u202e".encode(), "\ud83d\ude00".encode("utf-8", "surrogatepass"), b"\xed\xa0\x80", b"\x9b"),
    *(b"[bold]", b"</script>", b"{{ 7 }}", b"x" * 300, b"x" * 70_000, b":1:1 [0] NCCL INFO "),
)
_WORDS = (
    *("Channel 00/02 : 0[0] -> 1[0] [send] via NET/Socket/0 comm 0xa1 nRanks 04", "Trees [0]"),
    *("Trees [0] 1/2/3->0->-1 [1] -1/-1/-1->0->9", "Ring 00 : 3 -> 0 -> 1", "Channel 00/02 : 0 1"),
    "2 coll channels, 0 collnet channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer",
    "comm 0xa1 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 1b000 commId 0xfeed - Init START",
    "comm 0xa1 rank 9 nranks 4 cudaDev 0 busId 1b000 commId 0xfeed - Init COMPLETE",
    "comm 0xb1 rank 0 nranks 2 cudaDev 0 busId 1 parent 0xa1 splitCount 1 color 7 key 0 "
    "- Init START",
    "comm 0xa1 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0",
    "comm 0xa1 rank 0 nranks 4 cudaDev 0 busId 1b000 - Destroy COMPLETE",
    "AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x1 count 256 datatype 7 op 0 root 0 comm 0xa1 "
    "[nranks=4] stream 0x5",
    "AllGather: opCount ffffffffffffffff sendbuff 0x1 recvbuff 0x1 count 99 datatype 99 op 0 "
    "root 0 comm 0xc [nranks=4] stream 0x5",
    "AllReduce: 1024 Bytes -> Algo 1 proto 2 time 1.5",
    "AllReduce: 1024 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}",
    "AllReduce [Symmetric]: 1024 Bytes -> Kernel X nchannels 3 nthreads 4",
    *("NCCL_IB_DISABLE set by environment to 1.", "Using network Socket", "P2P is disabled"),
    *("NET/IB : Using [0]mlx5_0:1/RoCE ; OOB eth0:10.0.0.1<0>", "NET/Socket : Using eth0:1"),
    *("NCCL version 2.28.9+cuda12", "RCCL version : 2.20", "CollNet 00/0 : 1 [send] via COLLNET/x"),
)


@cache
def seeds() -> tuple[tuple[bytes, ...], ...]:
    """Lines of our recordings, the first few hundred of each file."""
    found = []
    for path in sorted((GOLDEN / "nccl").rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            text = gzip.decompress(data) if path.suffix == ".gz" else data
            found.append(tuple(text.split(b"\n")[:_MOST_LINES]))
    return tuple(found)


def mutate(rng: Random, folder: Path) -> Path:
    """A folder of one or more logs, sometimes beside a trace."""
    run = folder / "run"
    run.mkdir()
    for number in range(rng.choice((1, 1, 2, 4))):
        lines = list(rng.choice(seeds())) if rng.random() < 0.7 else _made(rng)
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            rng.choice(_WAYS)(rng, lines)
        data = rng.choice((b"\n", b"\n", b"\n", b"\r\n", b"\r")).join(lines)
        if rng.random() < 0.1:
            data = gzip.compress(data)[: rng.choice((None, -5, 200))]
            (run / f"nccl-{number}.log.gz").write_bytes(data)
        else:
            (run / f"nccl-{number}.log").write_bytes(data)
    if rng.random() < 0.1:
        shutil.copy(GOLDEN / "cpu_step.json.gz", run / "trace.json.gz")
    return run


def drive(path: Path, work: Path) -> str:
    """Every line is counted once; the summary prints and is JSON; beside a trace, all of it."""
    import contextlib
    import io

    from rich.console import Group

    from fuzz.drive import drive as drive_input
    from fuzz.sound import check_numbers
    from stepscope import StepscopeError
    from stepscope.explain.nccl_logs import explain_nccl
    from stepscope.trace.nccl_log.lines import find_nccl_logs
    from stepscope.trace.nccl_log.read import read_nccl_log
    from stepscope.ui.terminal.console import make_console
    from stepscope.ui.terminal.distributed import nccl_sections

    for file in find_nccl_logs(path):
        log = read_nccl_log(file)
        assert 0 <= log.foreign_lines + log.unread_lines + log.damaged_lines <= log.lines
        for comm in log.communicators:
            ranks = [rank for link in comm.links for rank in (link.from_rank, link.to_rank or 0)]
            assert comm.nranks is None or comm.rank is None or comm.rank < comm.nranks
            assert min(ranks, default=0) >= 0
    try:
        summary = explain_nccl(path)
    except StepscopeError:
        return REFUSED
    if summary is None:
        return REFUSED
    check_numbers(as_json(summary))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        make_console().print(Group(*nccl_sections(summary)))
    assert all(char == "\n" or char.isprintable() for char in printed.getvalue())
    return drive_input(path, work) if (path / "trace.json.gz").exists() else ANSWERED


def _made(rng: Random) -> list[bytes]:
    hosts = ("n1", "n2", "h" * 255, "host.x", "[bold]")
    return [
        f"{rng.choice(hosts)}:{rng.randrange(4)}:{rng.randrange(9)} [{rng.randrange(-1, 9)}] "
        f"NCCL {rng.choice(('INFO', 'INFO', 'WARN', 'TRACE'))} {rng.choice(_WORDS)}".encode()
        for _ in range(rng.randrange(1, 200))
    ]


def _places(rng: Random, lines: list[bytes]) -> list[int]:
    many = rng.choice((1, 3, 30, len(lines)))
    return rng.sample(range(len(lines)), min(len(lines), many))


def _numbers(rng: Random, lines: list[bytes]) -> None:
    """One number of a line is another one."""
    import re

    for at in _places(rng, lines):
        found = list(re.finditer(rb"\d+", lines[at]))
        if found:
            which = rng.choice(found)
            line = lines[at]
            lines[at] = line[: which.start()] + rng.choice(_NUMBERS) + line[which.end() :]


def _insert(rng: Random, lines: list[bytes]) -> None:
    for at in _places(rng, lines):
        middle = rng.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:middle] + rng.choice(_BYTES) + lines[at][middle:]


def _cut(rng: Random, lines: list[bytes]) -> None:
    for at in _places(rng, lines):
        lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]


def _mix(rng: Random, lines: list[bytes]) -> None:
    """Two processes write into each other's line."""
    for at in _places(rng, lines):
        other = rng.choice(lines)
        middle = rng.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:middle] + other + lines[at][middle:]


def _order(rng: Random, lines: list[bytes]) -> None:
    pick = rng.randrange(4)
    if pick == 0:
        rng.shuffle(lines)
    elif pick == 1:
        lines += lines[: rng.randrange(len(lines) + 1)]
    elif pick == 2:
        del lines[: rng.randrange(len(lines) + 1)]
    else:
        lines += rng.choice(seeds())


def _words(rng: Random, lines: list[bytes]) -> None:
    lines += _made(rng)


def _endless(rng: Random, lines: list[bytes]) -> None:
    word = rng.choice((b"x", b":1", b"NCCL INFO ", b"n1:1:1 [0] NCCL INFO ", b"\r", b"(", b"\x1b["))
    lines.insert(rng.randrange(len(lines) + 1), word * rng.choice((1000, 30_000, 200_000)))


def _splits(rng: Random, lines: list[bytes]) -> None:
    many = rng.choice((10, 3000))
    lines += [
        f"n1:1:{number} [0] NCCL INFO comm 0xb{number} rank 0 nranks 4 cudaDev 0 busId 1 parent "
        f"0xb{number - 1} splitCount {rng.randrange(9)} color 7 key 0 - Init START".encode()
        for number in range(many)
    ]


_WAYS: list[Callable[[Random, list[bytes]], None]] = [
    _numbers, _numbers, _numbers, _insert, _insert, _cut, _mix, _mix, _order, _words, _endless,
    _splits,
]  # fmt: skip
