"""--collect: parts of other hosts arrive whole; strangers, tricks and dead peers change nothing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import stepscope
from split_runs import split_run, two_host_run
from split_runs import without_paths as strip
from stepscope.measure.cluster.clock_meeting import open_listener
from stepscope.measure.cluster.collector_address import Rendezvous
from stepscope.measure.settings import Settings
from stepscope.records.folders import COLLECTOR, HOSTS
from stepscope.ui.jobs import collect
from stepscope.ui.jobs.collect import (
    Channel,
    FirstHost,
    PartCollector,
    Receiver,
    StrangerError,
    send_part,
)
from stepscope.ui.topics.explanation_json import explanation_json

TOKEN = "ab" * 32
SCRIPT = Path(__file__).parents[1] / "measure" / "scripts" / "ddp.py"
FAILURES = (OSError, EOFError, StrangerError)


@pytest.fixture
def parts(golden: Path, tmp_path: Path) -> list[Path]:
    return split_run(two_host_run(golden, tmp_path / "one"), tmp_path / "parts")


@pytest.fixture
def receiver(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The first host, with its ranks; `receiver.where` is what its rank 0 publishes."""
    monkeypatch.setattr(collect, "_WAIT_S", 2.0)
    with open_listener() as server:
        found: Any = Receiver(server, TOKEN, parts[0])
        port = server.getsockname()[1]
        name = os.uname().nodename
        where = FirstHost(hosts=["127.0.0.1"], host=name, port=port, token=TOKEN)
        found.start()
        yield type("First", (), {"receiver": found, "where": where, "run": parts[0]})
        found._over = True


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def answer(*paths: Path) -> Any:
    explained = explanation_json(stepscope.explain(list(paths), cache=False))
    return strip(json.loads(json.dumps(explained, default=list)))


def connect(first: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", first.where.port), 5)


@contextlib.contextmanager
def channel(first: Any) -> Iterator[Channel]:
    with connect(first) as peer:
        opened = Channel(peer, TOKEN, is_server=False, limit_s=5)
        opened.send_json({"host": "node1"})
        opened.receive_json()
        yield opened


def offer(opened: Channel, name: str, content: bytes = b"{}") -> None:
    opened.send_json({"file": name, "size_bytes": len(content)})
    if content:
        opened.send(content)


def taken(opened: Channel) -> int:
    opened.send_json({"end": True})
    return int(opened.receive_json()["files"])


def test_what_was_sent_is_explained_like_both_parts(receiver: Any, parts: list[Path]) -> None:
    expected = answer(*parts)
    before = contents(parts[0])
    sent, left_out = send_part(parts[1], receiver.where)
    assert left_out == []
    began = time.monotonic()
    receiver.receiver.finish()
    assert time.monotonic() - began < 1  # all ranks are here: nobody is waited for
    after = contents(parts[0])
    assert {name: after[name] for name in before} == before
    assert len(after) - len(before) == sent
    for name, content in contents(parts[1]).items():
        assert name == "run.json" or after[name] == content
    found = answer(parts[0])
    assert found["ranks"] == expected["ranks"]
    assert found["run"] == expected["run"]
    assert found["verdict"] == expected["verdict"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        os.urandom(1000),
        b"\xff" * 100_000,
        bytes(32) + struct.pack(">I32s", 1 << 31, bytes(32)),
    ],
    ids=["nothing", "http", "random", "much", "huge"],
)
def test_strangers_change_nothing(receiver: Any, parts: list[Path], data: bytes) -> None:
    before = contents(parts[0])
    strangers = [connect(receiver) for _ in range(5)]
    for stranger in strangers:
        with contextlib.suppress(OSError):
            stranger.sendall(data)
    time.sleep(0.3)
    assert contents(parts[0]) == before
    assert send_part(parts[1], receiver.where)[0] > 0
    for stranger in strangers:
        stranger.close()


def test_another_token_and_a_false_server_are_refused(receiver: Any, parts: list[Path]) -> None:
    before = contents(parts[0])
    with pytest.raises(FAILURES):
        send_part(parts[1], replace(receiver.where, token="cd" * 32))
    assert contents(parts[0]) == before
    with socket.create_server(("127.0.0.1", 0)) as false:
        where = replace(receiver.where, port=false.getsockname()[1])

        def answer_with_noise() -> None:
            peer, _ = false.accept()
            with contextlib.suppress(OSError), peer:
                peer.sendall(os.urandom(4096))
                peer.recv(4096)

        threading.Thread(target=answer_with_noise, daemon=True).start()
        with pytest.raises(FAILURES):
            send_part(parts[1], where)


def test_a_frame_cannot_be_replayed(receiver: Any) -> None:
    with channel(receiver) as opened:
        offer(opened, "hosts/00007.json")
        opened._sent -= 1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            offer(opened, "hosts/00008.json")
        with pytest.raises(FAILURES):
            taken(opened)
    assert not (receiver.run / "hosts" / "00008.json").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../escaped.json",
        "hosts/../../escaped.json",
        "/tmp/stepscope-escaped.json",
        "rank-00002/../../escaped.json",
        "rank-00002/deep/trace.json.gz",
        "rank-00000/trace.json.gz",
        "rank-00000/steps-00009.json.gz",
        "rank-00002/evil.py",
        "rank-00002/.hidden.json",
        "hosts/00000.json",
        "hosts/00000.processes.jsonl",
        "run.json",
        "report.html",
        "rank-00002\0/trace.json.gz",
        "rank-00002/trace.json.gz\n",
        "",
    ],
)
def test_names_that_are_no_new_part_are_refused(
    receiver: Any, parts: list[Path], tmp_path: Path, name: str
) -> None:
    before = contents(tmp_path)
    with channel(receiver) as opened:
        offer(opened, name)
        assert taken(opened) == 0
    assert contents(tmp_path) == before


def test_large_files_stay_and_are_named(
    receiver: Any, parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "MOST_FILE_BYTES", 10_000)
    (parts[1] / "rank-00001" / "trace.json.gz").write_bytes(bytes(10_001))
    _, left_out = send_part(parts[1], receiver.where)
    assert "rank-00001/trace.json.gz" in left_out
    assert not (parts[0] / "rank-00001" / "trace.json.gz").exists()
    assert (parts[0] / "rank-00001" / "steps.jsonl").exists()


def test_a_host_sends_no_more_than_its_share(
    receiver: Any, parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "MOST_HOST_BYTES", 20_000)
    _, left_out = send_part(parts[1], receiver.where)
    assert left_out
    with channel(receiver) as opened:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for number in range(5, 10):
                offer(opened, f"rank-0000{number}/steps.jsonl", bytes(9000))
        with pytest.raises(FAILURES):
            taken(opened)
    assert not (parts[0] / "rank-00009").exists()


def test_peers_that_are_slow_or_die_are_cut_off(
    receiver: Any, parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "_HELLO_S", 0.3)
    monkeypatch.setattr(collect, "_TRANSFER_S", 0.6)
    with connect(receiver) as silent:
        silent.settimeout(5)
        assert len(silent.recv(64)) == 32  # the random number
        assert silent.recv(64) == b""
    with channel(receiver) as dies:
        dies.send_json({"file": "rank-00002/steps.jsonl", "size_bytes": 5000})
        dies.send(bytes(100))
    with channel(receiver) as slow:
        slow.send_json({"file": "rank-00003/steps.jsonl", "size_bytes": 5000})
        time.sleep(1.0)
        began = time.monotonic()
        receiver.receiver.finish()  # rank 1 never comes
        assert time.monotonic() - began < 3
    assert {folder.name for folder in parts[0].glob("rank-*")} == {"rank-00000"}
    assert not list(parts[0].rglob("*.tmp"))


def test_a_first_host_that_cannot_be_reached_is_said(
    parts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    where = {"hosts": ["127.0.0.1"], "host": "node0", "port": port, "token": TOKEN}
    (parts[1] / "hosts" / COLLECTOR).write_text(json.dumps(where))
    collector = PartCollector.listen()
    assert collector is not None
    assert not collector.command_ended(parts[1])
    assert "node0 could not be reached" in capsys.readouterr().err
    assert not (parts[1] / "hosts" / COLLECTOR).exists()  # it holds the token


@pytest.mark.parametrize("content", [b"", b"[]", b'{"port": "x"}', b'{"hosts": [], "host": 3}'])
def test_a_damaged_address_is_said(parts: list[Path], content: bytes) -> None:
    (parts[1] / "hosts" / COLLECTOR).write_bytes(content)
    collector = PartCollector.listen()
    assert collector is not None
    assert not collector.command_ended(parts[1])


def listening_ports(pid: int) -> list[int]:
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(file.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a process another host name")
@pytest.mark.slow
def test_a_real_job_on_two_disks_is_explained_by_the_first_host(tmp_path: Path) -> None:
    command = [
        *("stepscope", "run", "--collect", "--out", str(tmp_path / "run-{place}"), "--"),
        *("torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=collected"),
        *("--master-addr=127.0.0.1", "--master-port=29673", "--node-rank={place}", str(SCRIPT)),
    ]
    place = "hostname collected-{place} && exec "
    binaries = Path(sys.executable).parent
    jobs = [
        subprocess.Popen(
            ["unshare", "--uts", "sh", "-c", (place + " ".join(command)).format(place=number)],
            env={**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    ports: list[int] = []
    limit = time.monotonic() + 60
    while not ports and time.monotonic() < limit:
        time.sleep(0.2)
        ports = listening_ports(jobs[0].pid)
    strangers = [socket.create_connection(("127.0.0.1", ports[0])) for _ in range(20)]
    for stranger in strangers[::2]:
        stranger.sendall(os.urandom(2000))
    said = [job.communicate(timeout=300)[1] for job in jobs]
    for stranger in strangers:
        stranger.close()
    assert [job.returncode for job in jobs] == [0, 0], said
    assert "from 1 other host: collected-1" in said[0]
    assert "verdict" in said[0]
    assert "to collected-0; the first host explains the run" in said[1]
    assert "verdict" not in said[1]
    first, second = tmp_path / "run-0", tmp_path / "run-1"
    found = answer(first)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["quality"] == []
    for name, content in contents(second / "rank-00001").items():
        assert (first / "rank-00001" / name).read_bytes() == content
    assert not list(tmp_path.rglob(COLLECTOR))


def test_only_the_owner_reads_the_token_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Store:
        def check(self, _keys: list[str]) -> bool:
            return True

        def get(self, _key: str) -> bytes:
            return json.dumps({"token": TOKEN}).encode()

    settings = Settings(folder=str(tmp_path), collect_port=1, collect_token="of this host")
    monkeypatch.setenv(*next(iter(settings.to_environment().items())))
    monkeypatch.setattr("stepscope.measure.cluster.collector_address._job_store", Store)
    Rendezvous(tmp_path, rank=1)._look()
    file = tmp_path / HOSTS / COLLECTOR
    assert json.loads(file.read_text()) == {"token": TOKEN}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
