"""NCCL's logs: every version's words, several processes in one file, and damage that is counted.

The recordings in golden/nccl are ours: NCCL 2.28.9 on one H200, with one rank, with four ranks that
NCCL_HOSTID made believe they were four machines, and with two ranks that NCCL refused. Words of
other versions and of RCCL are made up here after the format strings of their sources.
"""

from __future__ import annotations

import gzip
import time
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import UnreadableInputError
from stepscope.records.nccl import Communicator, NcclLog
from stepscope.trace.nccl_log.lines import find_nccl_logs
from stepscope.trace.nccl_log.read import read_nccl_log

START = "comm 0xa1 rank {rank} nranks 4 cudaDev 0 nvmlDev 0 busId 1b000 commId 0xfeed - Init START"
COMPLETE = START.replace("START", "COMPLETE")


class ReadLines(Protocol):
    def __call__(self, *lines: str | bytes) -> NcclLog: ...


def info(text: str, *, host: str = "n1", pid: int = 10, thread: int = 11) -> str:
    return f"{host}:{pid}:{thread} [0] NCCL INFO {text}\n"


def call(kind: str = "AllReduce", count: int = 256, datatype: int = 7, **given: object) -> str:
    told = {"op_count": "0", "comm": "0xa1", "ranks": 4, "stream": "0x55", "root": 0} | given
    return info(
        f"{kind}: opCount {told['op_count']} sendbuff 0x7f00 recvbuff 0x7f00 count {count} "
        f"datatype {datatype} op 0 root {told['root']} comm {told['comm']} "
        f"[nranks={told['ranks']}] stream {told['stream']}"
    )


@pytest.fixture
def log_of(tmp_path: Path) -> ReadLines:
    def reading(*lines: str | bytes) -> NcclLog:
        text = b"".join(line if isinstance(line, bytes) else line.encode() for line in lines)
        path = tmp_path / "nccl.log"
        path.write_bytes(text)
        return read_nccl_log(path)

    return reading


def calls_in(log: NcclLog) -> int:
    return sum(comm.calls for comm in log.communicators)


def only(log: NcclLog) -> Communicator:
    (comm,) = log.communicators
    return comm


# Our own recordings


def test_a_real_log_tells_who_talks_to_whom(golden: Path) -> None:
    log = read_nccl_log(golden / "nccl/h200-four-nodes/nccl.vm.647.log.gz")
    (process,) = log.processes
    assert (process.host, process.pid, process.network) == ("vm", 647, "Socket")
    assert log.versions == ("NCCL 2.28.9+cuda13.0",)
    assert process.interfaces == ("eth0:192.0.2.2<0>",)
    assert process.adapters == ()  # "NET/IB : Using [RO]" names none
    assert process.settings == {"NCCL_HOSTID": "h0"}
    world, second = log.communicators
    assert (world.rank, world.nranks, world.nodes, world.channels) == (0, 4, 4, 2)
    assert world.complete
    assert second.complete
    assert [(ring.previous, ring.next) for ring in world.rings] == [(3, 1), (3, 1)]
    assert {link.transport for link in second.links} == {"NET/Socket/0"}
    assert log.damaged_lines == log.foreign_lines == 0


def test_a_real_log_tells_the_calls_and_the_algorithms_chosen(golden: Path) -> None:
    log = read_nccl_log(golden / "nccl/h200-four-nodes/nccl.vm.647.log.gz")
    assert [comm.calls for comm in log.communicators] == [16, 3]
    chosen = {(choice.kind, choice.size_bytes): choice for choice in log.choices}
    largest = chosen["all_reduce", 4 << 20]
    assert (largest.algorithm, largest.first_channel, largest.last_channel) == ("RING", 0, 1)
    assert chosen["all_reduce", 28].algorithm == "TREE"  # of the second group
    assert "all_to_all" not in {kind for kind, _ in chosen}  # goes as sends and receives


def test_only_rank_0_names_algorithms(golden: Path) -> None:
    log = read_nccl_log(golden / "nccl/h200-four-nodes/nccl.vm.648.log.gz")
    assert log.choices == ()


def test_a_refused_communicator_is_not_complete_and_its_warning_is_kept(golden: Path) -> None:
    log = read_nccl_log(golden / "nccl/h200-duplicate-gpu/nccl.vm.779.log")
    assert not only(log).complete
    (warning,) = log.warnings
    assert warning.source == "init.cc:904"
    assert warning.text.startswith("Duplicate GPU detected : rank 0 and rank 1")
    assert (warning.line, warning.count) == (18, 1)  # a timestamp stands before it


def test_a_line_that_nccl_itself_cut_is_read_quickly(golden: Path) -> None:
    began = time.monotonic()
    log = read_nccl_log(next((golden / "nccl/h200-one-rank").iterdir()))
    assert time.monotonic() - began < 2
    world, _ = log.communicators
    assert (world.nranks, world.channels) == (1, 64)
    assert 40 < len(world.trees) < 64  # 1 KiB holds no more


# Words of the versions


@pytest.mark.parametrize(
    ("way", "told"),
    [
        (" : 0[1b000] -> 1[3d000] via P2P/direct pointer", ("P2P", "", False)),
        (" : 0[1b000] -> 1[3d000] via P2P/IPC/read", ("P2P", "", False)),
        (" : 0[1b000] -> 1[3d000] via direct shared memory", ("SHM", "", False)),
        (" : 0[0] -> 1[1] via SHM/direct/direct", ("SHM", "", False)),
        ("/0 : 0[0] -> 1[1] via P2P/CUMEM/read", ("P2P", "", False)),
        ("/0 : 0[0] -> 1[1] via P2P/MNNVL", ("P2P", "", False)),
        ("/0 : 0[0] -> 1[1] via P2P/indirect/3[3]", ("P2P", "", False)),
        ("/0 : 0[0] -> 1[1] [send] via NET/Socket/1", ("NET", "Socket", False)),
        ("/0 : 0[0] -> 1[1] [send] via NET/IB/3(2)/GDRDMA", ("NET", "IB", True)),
        ("/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA(PCI)/Shared", ("NET", "IB", True)),
        ("/1 : 0[0] -> 1[1] [send] via NET/AWS Libfabric/1", ("NET", "AWS Libfabric", False)),
        ("/0 : 0[c1000] -> 1[c6000] via P2P/IPC comm 0xa1 nRanks 04", ("P2P", "", False)),
    ],
)
def test_channels_of_every_version(
    log_of: ReadLines, way: str, told: tuple[str, str, bool]
) -> None:
    log = log_of(info(START.format(rank=0)), info(f"Channel 02{way}"))
    (link,) = only(log).links
    assert (link.from_rank, link.to_rank, link.channels) == (0, 1, (2,))
    assert link.transport == way.split(" via ")[1].removesuffix(" comm 0xa1 nRanks 04")
    assert (link.family, link.network, link.gdrdma) == told
    assert link.line == 2
    assert log.unread_lines == 0


def test_a_received_channel_belongs_to_the_receiver(log_of: ReadLines) -> None:
    log = log_of(
        info(START.format(rank=1)),
        info("Channel 00/0 : 0[0] -> 1[0] [receive] via NET/IB/0"),
        info("Channel 01/0 : 0[0] -> 1[0] [receive] via NET/IB/0"),
    )
    (link,) = only(log).links
    assert (link.own_rank, link.channels) == (1, (0, 1))


def test_a_network_that_reduces_has_no_peer(log_of: ReadLines) -> None:
    log = log_of(
        info(START.format(rank=0)), info("CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA")
    )
    (link,) = only(log).links
    assert (link.family, link.network, link.to_rank) == ("COLLNET", "SHARP", None)


@pytest.mark.parametrize(
    ("before", "after", "comm_id"),
    [
        ("", " busId 3d000 -", ""),
        ("", " busId 3d000 commId 0x12 -", "0x12"),
        ("", " nvmlDev 1 busId 3d000 commId 0x12 -", "0x12"),
        ("ncclCommInitRank ", " nvmlDev 1 busId 3d000 commId 0x12 -", "0x12"),
        ("[Rank 2] ncclCommInitRankConfig ", " nvmlDev 1 busId 3d000 commId 0x12 -", "0x12"),
        ("ncclCommSplit ", " busId 3d000 parent 0x9 color 3 key 2 commId 0x12 -", "0x12"),
        ("", " busId 3d000 used 67 bytes -", ""),
        ("ncclCommInitRank ", " busId 3d000 commId 0x12 localSize 24 used 67 bytes -", "0x12"),
    ],
)
def test_the_end_of_an_initialisation_in_every_version(
    log_of: ReadLines, before: str, after: str, comm_id: str
) -> None:
    log = log_of(info(f"{before}comm 0xa1 rank 2 nranks 4 cudaDev 1{after} Init COMPLETE"))
    comm = only(log)
    assert (comm.address, comm.rank, comm.nranks, comm.device) == ("0xa1", 2, 4, 1)
    assert (comm.bus_id, comm.id, comm.complete) == ("3d000", comm_id, True)
    assert log.processes[0].ranks == ({comm_id: 2} if comm_id else {})


def test_a_split_is_known_by_its_parent_since_2_23(log_of: ReadLines) -> None:
    split = (
        "ncclCommSplit comm 0xb2 rank 1 nranks 2 cudaDev 0 nvmlDev 0 busId 1b000 parent 0xa1 "
        "splitCount 1 color 7 key 3- Init START"
    )
    log = log_of(info(START.format(rank=3)), info(COMPLETE.format(rank=3)), info(split))
    assert [comm.id for comm in log.communicators] == ["0xfeed", "0xfeed/1.7"]


def test_before_2_18_channels_go_to_the_communicator_completed_after_them(
    log_of: ReadLines,
) -> None:
    def made(comm: str, rank: int, peer: int) -> list[str]:
        return [
            info(f"Channel 00 : {rank}[1b000] -> {peer}[3d000] via P2P/IPC"),
            info("8 coll channels, 16 p2p channels, 16 p2p channels per peer"),
            info(f"comm {comm} rank {rank} nranks 8 cudaDev 0 busId 1b000 - Init COMPLETE"),
        ]

    log = log_of(*made("0xa1", 5, 6), *made("0xb2", 1, 0))
    first, second = log.communicators
    assert [(link.from_rank, link.to_rank) for link in first.links] == [(5, 6)]
    assert [(link.from_rank, link.to_rank) for link in second.links] == [(1, 0)]
    assert (first.channels, first.p2p_channels_per_peer) == (8, 16)


def test_channels_connected_later_go_to_the_communicator_in_use(log_of: ReadLines) -> None:
    other = COMPLETE.replace("0xa1", "0xb2").replace("feed", "beef")
    log = log_of(
        info(START.format(rank=0)),
        info(COMPLETE.format(rank=0)),
        info(other.replace("COMPLETE", "START").format(rank=0)),
        info(other.format(rank=0)),
        call(comm="0xa1"),
        info("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", thread=99),
    )
    first, second = log.communicators
    assert len(first.links) == 1
    assert not second.links
    assert first.guessed_lines == 1


def test_an_address_used_again_is_another_communicator(log_of: ReadLines) -> None:
    destroyed = "comm 0xa1 rank 0 nranks 4 cudaDev 0 busId 1b000 - Destroy COMPLETE"
    again = START.replace("feed", "beef").format(rank=0)
    log = log_of(info(START.format(rank=0)), call(), info(destroyed), info(again), call(), call())
    assert [comm.id for comm in log.communicators] == ["0xfeed", "0xbeef"]
    assert [comm.calls for comm in log.communicators] == [1, 2]


def test_rings_trees_and_counts(log_of: ReadLines) -> None:
    comm = only(
        log_of(
            info(START.format(rank=0)),
            info("Ring 00 : 3 -> 0 -> 1"),
            info("Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->2"),
            info("Channel 00/02 :    0   1   2   3"),
            info(
                "2 coll channels, 2 collnet channels, 16 nvls channels, 4 p2p channels, "
                "1 p2p channels per peer"
            ),
        )
    )
    assert [(ring.channel, ring.previous, ring.next) for ring in comm.rings] == [(0, 3, 1)]
    assert [(tree.up, tree.down) for tree in comm.trees] == [(-1, (1, -1, -1)), (2, (-1, -1, -1))]
    assert (comm.channels, comm.nvls_channels, comm.p2p_channels) == (2, 16, 4)


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NCCL version 2.18.1+cuda12.1\n", "NCCL 2.18.1+cuda12.1"),
        (info("NCCL version 2.10.3+cuda11.3"), "NCCL 2.10.3+cuda11.3"),
        ("RCCL version : 2.20.5-HEAD:abc123\n", "RCCL 2.20.5-HEAD:abc123"),
        ("RCCL version 2.6.4+hip3.5\n", "RCCL 2.6.4+hip3.5"),
    ],
)
def test_versions(log_of: ReadLines, line: str, version: str) -> None:
    assert log_of(line).versions == (version,)


def test_what_a_process_found_and_was_told(log_of: ReadLines) -> None:
    (process,) = log_of(
        info("Bootstrap : Using eth0:10.0.0.7<0>"),
        info("NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB ib0:10.1.0.7<0>"),
        info("NET/OFI Selected Provider is efa (found 4 nics)"),
        info("NET/Socket : Using [0]eth0:10.0.0.7<0> [1]eth1:10.0.1.7<0>"),
        info("Using network IBext_v8"),
        info("NET/Plugin: Loaded net plugin IBext_v8 (v8)"),
        info("TUNER/Plugin: Using tuner plugin nccl_ofi_tuner"),
        info("NCCL_IB_DISABLE set by environment to 0."),
        info("NCCL_SOCKET_IFNAME set by environment to eth0"),
        info("NCCL_IB_HCA set to mlx5_0"),
        info("P2P is disabled between connected GPUs 0 and 1. You can repress this message"),
    ).processes
    assert process.adapters == ("mlx5_0:1/IB", "mlx5_1:1/RoCE", "efa (found 4 nics)")
    assert process.interfaces == ("eth0:10.0.0.7<0>", "eth1:10.0.1.7<0>")
    assert (process.network, process.plugin) == ("IBext_v8", "IBext_v8")
    assert process.tuner == "nccl_ofi_tuner"
    assert process.settings == {
        "NCCL_IB_DISABLE": "0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "mlx5_0",
    }
    assert [(fact.line, fact.text[:15]) for fact in process.facts] == [(11, "P2P is disabled")]


# Calls


def test_calls_of_a_communicator_whose_beginning_is_missing(log_of: ReadLines) -> None:
    log = log_of(call(comm="0x77", ranks=16, op_count="1f", stream="(nil)"))
    comm = only(log)
    assert (comm.address, comm.nranks, comm.rank, comm.complete) == ("0x77", 16, None, False)
    assert comm.calls == 1


@pytest.mark.parametrize(
    ("line", "chosen"),
    [
        ("1024 Bytes -> Algo 1 proto 2 time 39.5", ("RING", "SIMPLE", None, None)),
        ("AllReduce: 1024 Bytes -> Algo 0 proto 0 time 7.1", ("TREE", "LL", None, None)),
        (
            "AllReduce: 1024 Bytes -> Algo NVLS_TREE proto LL128 channel{Lo..Hi}={2..9}",
            ("NVLS_TREE", "LL128", 2, 9),
        ),
        (
            "AllReduce [Symmetric]: 1024 Bytes -> Kernel AGxLL_R nchannels 4 nthreads 512",
            ("SYMMETRIC", "AGxLL_R", 0, 3),
        ),
    ],
)
def test_algorithms_in_every_version(
    log_of: ReadLines, line: str, chosen: tuple[str, str, int | None, int | None]
) -> None:
    (choice,) = log_of(info(START.format(rank=0)), call(), info(line)).choices
    assert chosen == (
        choice.algorithm,
        choice.protocol,
        choice.first_channel,
        choice.last_channel,
    )
    assert choice.count == 1


def test_choices_are_counted_by_kind_and_size(log_of: ReadLines) -> None:
    log = log_of(
        info("AllReduce: 400 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}"),
        info("AllGather: 400 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}"),
        info("AllReduce: 400 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}"),
    )
    counts = [(choice.kind, choice.algorithm, choice.count) for choice in log.choices]
    assert counts == [("all_reduce", "TREE", 2), ("all_gather", "RING", 1)]


# Several processes, other people's lines, damage


def test_processes_mixed_in_one_file_are_told_apart(log_of: ReadLines) -> None:
    link = "Channel 00/0 : {0}[0] -> {1}[0] via P2P/CUMEM"
    log = log_of(
        info(START.format(rank=0), pid=10),
        info(START.format(rank=1), pid=20),
        info(START.format(rank=0), pid=10, host="n2"),
        info(link.format(1, 2), pid=20),
        info(link.format(0, 1), pid=10),
    )
    assert [(p.host, p.pid) for p in log.processes] == [("n1", 10), ("n1", 20), ("n2", 10)]
    seen = [(comm.process, [link.to_rank for link in comm.links]) for comm in log.communicators]
    assert seen == [(0, [1]), (1, [2]), (2, [])]


@pytest.mark.parametrize(
    "before",
    [
        b"[2025-01-01 12:00:00] ",
        b"[1,0]<stdout>:",
        b"[0] ",
        b"[rank3]:",
        b"(worker pid=41, ip=10.0.0.2) ",
        b"  | 2025-05-22T14:26:33.405-07:00 | ",
        b"\x1b[36m(Trainer pid=7)\x1b[0m ",
        b"epoch 1:  50%|#####     |\repoch 1: 100%|##########|\r",
        b"\xff\xfe\x80 ",
    ],
)
def test_whatever_stands_before_a_line(log_of: ReadLines, before: bytes) -> None:
    log = log_of(before + info(COMPLETE.format(rank=2)).encode().replace(b"\n", b"\r\n"))
    assert (log.processes[0].host, log.processes[0].pid) == ("n1", 10)
    assert (only(log).rank, only(log).line) == (2, 1)


def test_foreign_unread_and_damaged_lines_are_counted(log_of: ReadLines) -> None:
    log = log_of(
        "step 1 loss 2.5\n",
        "\n",
        info("Setting affinity for GPU 0 to ffff"),
        info("AllReduce: opCount 1f sendbuff 0x7f recv"),
        "n1:10:11 [0] NCCL INn1:20:21 NCCL INFO Trees\n",
        call(),
    )
    assert (log.lines, log.foreign_lines, log.unread_lines, log.damaged_lines) == (6, 2, 1, 2)
    assert calls_in(log) == 1


def test_a_line_without_its_end_is_left_out_and_counted(log_of: ReadLines) -> None:
    log = log_of(call(), call(stream="0x5500")[:-3])
    assert calls_in(log) == 1
    assert log.damaged_lines == 1


def test_numbers_too_large_to_be_meant_are_damage(log_of: ReadLines) -> None:
    log = log_of(call(count=10**30), call(), call(op_count="f" * 40))
    assert calls_in(log) == 1
    assert log.damaged_lines == 2


def test_warnings_alike_are_counted_and_their_number_is_bounded(log_of: ReadLines) -> None:
    def warn(text: str) -> str:
        return f"\nn1:10:11 [0] misc/socket.cc:49 (progress) NCCL WARN {text}\n"

    log = log_of(warn("peer closed") * 3, *(warn(f"peer {i} closed") for i in range(600)))
    first = log.warnings[0]
    assert (first.text, first.count, first.line) == ("peer closed", 3, 2)
    assert first.source == "misc/socket.cc:49"
    assert len(log.warnings) + log.warnings_left_out == 601


def test_a_cut_compressed_log_says_so(tmp_path: Path) -> None:
    whole = gzip.compress("".join(call(op_count=f"{i:x}") for i in range(5000)).encode())
    path = tmp_path / "nccl.log.gz"
    path.write_bytes(whole[: len(whole) // 2])
    log = read_nccl_log(path)
    assert 0 < calls_in(log) < 5000
    assert log.ended_early is not None


def test_a_missing_file_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="does not exist"):
        read_nccl_log(tmp_path / "gone.log")


_PARTS = st.sampled_from(
    [
        info(START.format(rank=0)), info(COMPLETE.format(rank=0)), call(), call("Send"),
        info("Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA"), info("Trees [0] 1/-"),
        info("Ring 00 : 1 -> 0 -> 1"), "\r", "\n", "\x1b[0m", "NCCL INFO ", "NCCL version 2.",
        info("AllReduce: 1024 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}"),
        info("comm 0xa1 rank 0 nranks 4 cudaDev 0 busId 1b000 - Destroy COMPLETE"),
    ]
)  # fmt: skip


@given(st.lists(st.one_of(_PARTS.map(str.encode), st.binary(max_size=40)), max_size=30), st.data())
def test_nothing_breaks_the_reader_and_no_line_is_lost(
    tmp_path: Path, parts: list[bytes], data: st.DataObject
) -> None:
    text = b"".join(parts)
    cut = data.draw(st.integers(0, len(text)))
    path = tmp_path / "any.log"
    path.write_bytes(text[:cut])
    log = read_nccl_log(path)
    assert log.foreign_lines + log.unread_lines + log.damaged_lines <= log.lines
    assert calls_in(log) + sum(w.count for w in log.warnings) <= log.lines
    assert all(comm.process < len(log.processes) for comm in log.communicators)


@pytest.mark.parametrize("text", ["Trees" + " [0] 1->2->3" * 90 + " [", "x" * 200_000 + " NCCL "])
def test_no_line_takes_long(log_of: ReadLines, text: str) -> None:
    began = time.monotonic()
    log_of(info(text), text + "\n", text)
    assert time.monotonic() - began < 2


def test_every_call_is_counted(log_of: ReadLines) -> None:
    log = log_of(*(call(op_count=f"{i:x}", count=i % 7) for i in range(20_000)))
    assert calls_in(log) == 20_000


def test_logs_of_a_run_folder_are_found_and_nothing_else(tmp_path: Path) -> None:
    for name in ("nccl.n1.10.log", "nccl.n2.20.log", "job.log"):
        (tmp_path / name).write_text("hello\n" + call())
    (tmp_path / "other.log").write_text("hello\n")
    (tmp_path / "run.json").write_text(call())
    (tmp_path / "nccl.empty.log").write_text("")
    (tmp_path / "rank-00000").mkdir()
    (tmp_path / "rank-00000" / "nccl.n3.30.log").write_text(call())
    found = [path.name for path in find_nccl_logs(tmp_path)]
    assert found == ["job.log", "nccl.n1.10.log", "nccl.n2.20.log", "nccl.n3.30.log"]


def test_a_file_stands_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "anything"
    path.write_text(call())
    assert find_nccl_logs(path) == [path]
    assert find_nccl_logs(tmp_path) == []
    with pytest.raises(UnreadableInputError, match="does not exist"):
        find_nccl_logs(tmp_path / "gone")


DIGITS = "9" * 5000
ODD_LINES = {
    "a count of 5,000 digits": call(count=DIGITS),  # type: ignore[arg-type]
    "a datatype of 5,000 digits": call(datatype=DIGITS),  # type: ignore[arg-type]
    "more bytes than there are": call(count=10**17),
    "no ranks at all": call(ranks=0),
    "a negative count": call(count=-1),
    "a size of 4,000 digits": info(f"AllReduce: {DIGITS[:4000]} Bytes -> Algo 1 proto 2 time 1.0"),
    "a channel of 5,000 digits": info(
        f"AllReduce: 8 Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..{DIGITS}}}"
    ),
    "a rank beyond the world": info(START.format(rank=4)),
    "a link beyond the world": info("Channel 00/0 : 0[0] -> 9[0] via P2P/IPC comm 0xa1 nRanks 04"),
    "a ring beyond the world": info("Ring 00 : 9 -> 0 -> 1 comm 0xa1 nRanks 04"),
    "a tree beyond the world": info("Trees [0] 9/-1/-1->0->-1 comm 0xa1 nRanks 04"),
    "a channel nobody has": info("Channel 99999/0 : 0[0] -> 1[0] via P2P/IPC comm 0xa1 nRanks 04"),
    "more local ranks than ranks": info("comm 0xa1 rank 0 nRanks 4 nNodes 1 localRanks 5"),
}


@pytest.mark.parametrize("what", ODD_LINES)
def test_numbers_that_nccl_cannot_mean_are_damage(log_of: ReadLines, what: str) -> None:
    log = log_of(info(START.format(rank=0)), ODD_LINES[what])
    assert (log.lines, log.damaged_lines) == (2, 1)
    assert only(log).links == ()
    assert only(log).rings == ()
    assert only(log).rank == 0
    assert calls_in(log) == 0


@pytest.mark.parametrize(
    "text",
    [
        f"Channel {DIGITS}/0 : 0[0] -> 1[0] via P2P",
        f"AllReduce: {DIGITS} Bytes -> Algo 1 proto 2 time 1.0",
        f"comm 0xa1 rank {DIGITS} nranks 4 cudaDev 0 busId 1b000 - Init START",
        f"Ring 00 : 0 -> 1 -> {DIGITS}",
        "Trees [0] 1//2->0->-1",
        "Trees [0] 1-2/-->0->-1",
        "AllReduce: 8 Bytes -> Algo \u00b2 proto \u0662 time 1.0",
        f"comm 0xa1 rank 0 nRanks 4 nNodes 1 localRanks {DIGITS}",
    ],
)
def test_what_only_looks_like_a_number_ends_nothing(log_of: ReadLines, text: str) -> None:
    log = log_of(info(START.format(rank=0)), info(text))
    assert log.lines == 2
    assert only(log).rings == ()
    assert only(log).links == ()
    assert only(log).local_ranks is None


def test_a_line_of_megabytes_is_one_line_and_the_next_is_read(log_of: ReadLines) -> None:
    endless = b"n1:10:11 [0] NCCL INFO " + b"x" * 3_000_000 + b"\n"
    log = log_of(endless, info(START.format(rank=0)))
    assert (log.lines, log.damaged_lines) == (2, 1)
    assert only(log).line == 2


def test_a_progress_bar_of_megabytes_hides_nothing(log_of: ReadLines) -> None:
    bar = b"\r" + b"|".join([b"=" * 80 + b"\r"] * 30_000)
    log = log_of(bar + info(START.format(rank=0)).encode())
    assert only(log).line == 1
    assert log.damaged_lines == 0


def test_communicators_without_end_stay_bounded(log_of: ReadLines) -> None:
    """Splits of splits, each with a longer id, and lines that fit none of them."""
    parent = [info(START.format(rank=0))]
    children = [
        info(
            f"comm 0xb{number} rank 0 nranks 4 cudaDev 0 busId 1b000 "
            f"parent {'0xa1' if not number else f'0xb{number - 1}'} splitCount 1 color 7 key 0 "
            "- Init START",
            thread=number + 20,
        )
        for number in range(3000)
    ]
    stray = [info("Channel 00/0 : 7[0] -> 9[0] via P2P/IPC", thread=5) for _ in range(2000)]
    began = time.monotonic()
    log = log_of(*parent, *children, *stray)
    assert time.monotonic() - began < 20
    assert len(log.communicators) <= 1024
    assert max(len(comm.id) for comm in log.communicators) <= 256


@pytest.mark.parametrize("word", ["a" * 8000, ":1" * 4000, ":1:1 [0] (" * 800, "\x1b[" * 4000])
def test_lines_made_to_be_searched_for_ever_are_not(log_of: ReadLines, word: str) -> None:
    began = time.monotonic()
    log = log_of(*[f"{word} NCCL INFO x\n"] * 300)
    assert log.lines == 300
    assert time.monotonic() - began < 10


def test_links_beyond_a_world_that_is_known_later_are_damage(log_of: ReadLines) -> None:
    log = log_of(
        info("Channel 00/0 : 9[0] -> 1[0] via P2P/IPC comm 0xa1 nRanks 04"),
        call(ranks=4),
    )
    assert all(comm.rank is None or comm.rank < 4 for comm in log.communicators if comm.nranks)
    assert log.lines == 2


def test_lines_that_end_in_carriage_returns_alone_are_lines(log_of: ReadLines) -> None:
    text = info(START.format(rank=0)).replace("\n", "\r") + call().replace("\n", "\r")
    assert calls_in(log_of(text)) == 1
