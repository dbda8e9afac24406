"""Findings from NCCL's logs, and their summary.

No machine of several GPUs was at hand: the four-rank recording is one H200 that NCCL was told is
four machines; InfiniBand, P2P and shared memory stand here in lines made after NCCL's sources.
"""

from __future__ import annotations

import gzip
import unicodedata
from pathlib import Path

import pytest
from rich.console import Group

from stepscope.errors import UnreadableInputError
from stepscope.explain.findings import load_rules
from stepscope.explain.nccl_logs import explain_nccl, find_in_nccl
from stepscope.records.explanation import Finding, NcclSummary
from stepscope.records.nccl import NcclLog
from stepscope.trace.nccl_log.read import read_nccl_log
from stepscope.ui.terminal.console import make_console
from stepscope.ui.terminal.distributed import nccl_sections

PAGES = Path(__file__).parents[2] / "docs/findings"


class Job:
    """Two machines of two ranks each; every rank writes its own log."""

    def __init__(self, folder: Path, hosts: tuple[str, ...] = ("n1", "n1", "n2", "n2")) -> None:
        self.folder = folder
        self.hosts = hosts
        self.extra: dict[int, list[str]] = {}
        self.ways: dict[tuple[int, int], str] = {}
        self.channels = dict.fromkeys(range(len(hosts)), 2)
        self.nodes: tuple[int, int] | None = (len(set(hosts)), len(hosts) // len(set(hosts)))

    def say(self, text: str, *ranks: int) -> Job:
        for rank in ranks or range(len(self.hosts)):
            self.extra.setdefault(rank, []).append(text)
        return self

    def link(self, way: str, *pairs: tuple[int, int]) -> Job:
        self.ways |= dict.fromkeys(pairs, way)
        return self

    def logs(self) -> list[NcclLog]:
        return [read_nccl_log(self._write(rank)) for rank in range(len(self.hosts))]

    def findings(self) -> dict[str, Finding]:
        return {finding.id: finding for finding in find_in_nccl(self.logs())}

    def _write(self, rank: int) -> Path:
        comm = f"comm 0xa{rank} rank {rank}"
        begin = f"{comm} nranks {len(self.hosts)} cudaDev 0 busId 1b000 commId 0xfeed - Init"
        lines = [*self.extra.get(rank, ()), f"{begin} START"]
        if self.nodes:
            nodes, local = self.nodes
            size = len(self.hosts)
            lines.append(f"{comm} nRanks {size} nNodes {nodes} localRanks {local} localRank 0")
        for (a, b), way in self.ways.items():
            for channel in range(self.channels[rank]):
                if rank == a:
                    lines.append(f"Channel {channel:02}/0 : {a}[0] -> {b}[0] [send] via {way}")
                elif rank == b and way.startswith("NET"):
                    lines.append(f"Channel {channel:02}/0 : {a}[0] -> {b}[0] [receive] via {way}")
        lines.append(
            f"{self.channels[rank]} coll channels, 4 p2p channels, 4 p2p channels per peer"
        )
        lines.append(f"{begin} COMPLETE")
        path = self.folder / f"nccl.{self.hosts[rank]}.{100 + rank}.log"
        path.write_text(
            "".join(f"{self.hosts[rank]}:{100 + rank}:9 [0] NCCL INFO {line}\n" for line in lines)
        )
        return path


WITHIN = ((0, 1), (1, 0), (2, 3), (3, 2))
BETWEEN = ((1, 2), (3, 0))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path).link("P2P/CUMEM", *WITHIN)


def test_infiniband_and_p2p_are_nothing_to_talk_about(job: Job) -> None:
    job.say("NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.0.0.1<0>")
    assert job.link("NET/IB/0/GDRDMA", *BETWEEN).findings() == {}


def test_sockets_between_machines_with_adapters_are_grave(job: Job) -> None:
    job.say("NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.0.0.1<0>", 0, 1)
    job.say("NET/IB : No device found.", 2, 3)
    finding = job.link("NET/Socket/0", *BETWEEN).findings()["nccl-socket-fallback"]
    assert finding.severity == "high"
    assert finding.evidence[0] == (
        "communicator 0xfeed (4 ranks): ranks 1 -> 2, 3 -> 0 use NET/Socket/0 on channels 0-1 "
        "(nccl.n1.100.log:6)"
    )
    assert "n1 has mlx5_0:1/IB" in finding.evidence
    assert any('NCCL on n2: "NET/IB : No device found."' in line for line in finding.evidence)
    first = finding.where[0]
    assert "NET/Socket/0" in Path(first.file).read_text().splitlines()[first.line - 1]


def test_sockets_where_nothing_else_was_seen_are_a_low_note(job: Job) -> None:
    job.say("NET/IB : No device found.")
    finding = job.link("NET/Socket/0", *BETWEEN).findings()["nccl-socket-fallback"]
    assert finding.severity == "low"
    assert "found no faster network" in finding.summary


@pytest.mark.parametrize(
    "setting",
    ["NCCL_IB_DISABLE set by environment to 1.", "NCCL_NET set by environment to Socket"],
)
def test_sockets_that_the_environment_asked_for_are_medium(job: Job, setting: str) -> None:
    finding = job.say(setting).link("NET/Socket/0", *BETWEEN).findings()["nccl-socket-fallback"]
    assert finding.severity == "medium"
    assert finding.remedies[0].id == "unset-nccl-variables"
    assert any(setting.split(" ")[0] + "=" in line for line in finding.evidence)


def test_a_switch_that_is_off_is_no_reason(job: Job) -> None:
    job.say("NCCL_IB_DISABLE set by environment to 0.").say("NCCL_NET set by environment to IB")
    finding = job.link("NET/Socket/0", *BETWEEN).findings()["nccl-socket-fallback"]
    assert finding.severity == "low"


def test_sockets_within_a_machine_are_grave(tmp_path: Path) -> None:
    job = Job(tmp_path, ("n1", "n1")).link("NET/Socket/0", (0, 1), (1, 0))
    finding = job.findings()["nccl-socket-fallback"]
    assert finding.severity == "high"
    assert "Ranks on one machine" in finding.summary
    assert finding.remedies[0].id == "one-machine"


def test_equal_host_names_are_not_one_machine_when_nccl_counts_two(tmp_path: Path) -> None:
    job = Job(tmp_path, ("trainer", "trainer")).link("NET/Socket/0", (0, 1), (1, 0))
    job.nodes = (2, 1)
    finding = job.findings()["nccl-socket-fallback"]
    assert finding.severity == "low"
    assert "one machine" not in finding.summary


def test_shared_memory_within_a_machine_is_a_soft_note(job: Job) -> None:
    job.link("SHM/direct/direct", (2, 3), (3, 2)).link("NET/IB/0", *BETWEEN)
    finding = job.findings()["nccl-no-p2p"]
    assert finding.severity == "low"
    assert finding.summary.startswith("1 of 2 pairs of ranks on one machine")
    assert "ranks 2 -> 3, 3 -> 2 use SHM/direct/direct on channels 0-1" in finding.evidence[0]


@pytest.mark.parametrize(
    "why",
    [
        "NCCL_P2P_DISABLE set by environment to 1.",
        "P2P is disabled between connected GPUs 0 and 1. You can repress this message",
    ],
)
def test_p2p_that_somebody_forbids_is_medium(job: Job, why: str) -> None:
    finding = job.say(why).link("SHM/direct", *WITHIN).findings()["nccl-no-p2p"]
    assert finding.severity == "medium"
    assert any("P2P" in line for line in finding.evidence[1:])


def test_unequal_channel_counts_name_the_odd_rank(job: Job) -> None:
    job.link("NET/IB/0/GDRDMA", *BETWEEN)
    job.channels[3] = 1
    finding = job.findings()["nccl-unequal-channels"]
    assert finding.severity == "medium"
    assert finding.evidence == (
        "communicator 0xfeed (4 ranks): 2 channels for collectives on ranks 0-2 "
        "(nccl.n1.100.log:1), 1 on rank 3 (nccl.n2.103.log:1)",
    )


def test_gpu_direct_on_some_ranks_only_is_unequal(job: Job) -> None:
    job.link("NET/IB/0/GDRDMA", (1, 2)).link("NET/IB/0", (3, 0))
    finding = job.findings()["nccl-unequal-channels"]
    assert finding.severity == "medium"
    assert "NET/IB with GPU direct RDMA on ranks 1-2" in finding.evidence[0]
    assert "NET/IB without GPU direct RDMA on ranks 0, 3" in finding.evidence[0]


def test_machines_that_differ_inside_are_unequal_but_softly(job: Job) -> None:
    job.link("SHM/direct/direct", (2, 3), (3, 2)).link("NET/IB/0", *BETWEEN)
    finding = job.findings()["nccl-unequal-channels"]
    assert finding.severity == "low"
    assert "P2P inside the machine on ranks 0-1" in finding.evidence[0]


def test_a_rank_without_network_links_is_not_unequal(job: Job) -> None:
    assert job.link("NET/IB/0", (1, 2), (2, 1)).findings() == {}


def test_warnings_alike_are_one_line_with_a_place(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_text(
        "".join(
            f"\nn1:{pid}:9 [0] misc/socket.cc:49 NCCL WARN Connection closed by peer n2<{pid}>\n"
            for pid in (100, 101, 102)
        )
    )
    (finding,) = find_in_nccl([read_nccl_log(path)])
    assert (finding.id, finding.severity) == ("nccl-warnings", "low")
    assert finding.evidence == (
        "3 x Connection closed by peer n2<100> (misc/socket.cc:49), first at nccl.log:2",
    )
    assert finding.where[0].line == 2


def test_a_communicator_that_never_came_up_makes_warnings_graver(golden: Path) -> None:
    summary = explain_nccl(golden / "nccl/h200-duplicate-gpu")
    assert summary is not None
    (finding,) = summary.findings
    assert (finding.id, finding.severity) == ("nccl-warnings", "medium")
    assert "never finished its initialization" in finding.summary


def test_every_finding_has_a_page_and_no_made_up_share(job: Job) -> None:
    job.link("NET/Socket/0", *BETWEEN).link("SHM/direct", (2, 3))
    job.channels[3] = 1
    findings = find_in_nccl(job.logs())
    assert len(findings) == 3
    ids = {rule.id for rule in load_rules("nccl")}
    assert {page.stem for page in PAGES.glob("nccl-*.md")} == ids
    for finding in findings:
        assert finding.id in ids
        assert finding.share == 0.0  # a log knows no times
        page = (PAGES / f"{finding.id}.md").read_text()
        assert page.startswith(f"# {finding.id}\n## What it says\n")
    order = ["high", "medium", "low"]
    severities = [finding.severity for finding in findings]
    assert severities == sorted(severities, key=order.index)


# The summary


@pytest.fixture
def four(golden: Path) -> NcclSummary:
    summary = explain_nccl(golden / "nccl/h200-four-nodes")
    assert summary is not None
    return summary


def test_the_four_rank_recording_in_sum(four: NcclSummary) -> None:
    assert four.versions == ("NCCL 2.28.9+cuda13.0",)
    world, second = four.communicators
    assert (world.nranks, world.ranks_seen, world.nodes, world.channels) == (4, 4, 4, (2,))
    assert world.calls == 4 * 16
    assert second.calls == 4 * 3
    assert {row.transport for row in four.transports} == {"NET/Socket/0", "NET/Socket/0/Shared"}
    assert all(row.within_host is False for row in four.transports)  # NCCL_HOSTID says so
    assert four.choices[0].algorithm == "RING"
    assert sorted(four.settings["NCCL_HOSTID"]) == ["h0", "h1", "h2", "h3"]
    (finding,) = four.findings
    assert (finding.id, finding.severity) == ("nccl-socket-fallback", "low")


def test_no_log_is_no_summary(tmp_path: Path) -> None:
    assert explain_nccl(tmp_path) is None
    with pytest.raises(UnreadableInputError):
        explain_nccl(tmp_path / "gone.log")


def test_notes_say_what_the_logs_do_not_hold(golden: Path) -> None:
    summary = explain_nccl(golden / "nccl/h200-duplicate-gpu/nccl.vm.779.log")
    assert summary is not None
    assert any("only 1 rank has logs" in note for note in summary.notes)
    assert any("NCCL_DEBUG_SUBSYS" in note for note in summary.notes)


def test_one_mixed_file_says_the_same_as_one_file_a_process(golden: Path, tmp_path: Path) -> None:
    parts = sorted((golden / "nccl/h200-four-nodes").iterdir())
    split = [gzip.decompress(part.read_bytes()).splitlines(keepends=True) for part in parts]
    longest = max(map(len, split))
    mixed = [lines[i] for i in range(longest) for lines in split if i < len(lines)]
    (tmp_path / "all.log").write_bytes(b"".join(mixed))
    one, many = explain_nccl(tmp_path), explain_nccl(*parts)
    assert one is not None
    assert many is not None
    assert one.communicators == many.communicators
    assert set(one.transports) == set(many.transports)
    assert one.choices == many.choices


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_holds_the_tables_in_its_width(
    four: NcclSummary, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    make_console(width).print(Group(*nccl_sections(four, width=width)))
    shown = capsys.readouterr().out
    for words in ("communicators", "connections between ranks", "algorithms", "environment"):
        assert words in shown
    for line in shown.splitlines():
        cells = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)
        assert cells <= width, line
