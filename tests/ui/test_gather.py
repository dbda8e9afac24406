"""Parts of one job from several places, copied into one run folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import stepscope
from split_runs import BEGAN_S, change_host, change_rank, split_run, two_host_run
from split_runs import without_paths as strip
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.ui.cli.gather import gather
from stepscope.ui.cli.verbs import cli
from stepscope.ui.jobs.gather_parts import FolderSource
from stepscope.ui.topics.explanation_json import explanation_json


@pytest.fixture
def one(golden: Path, tmp_path: Path) -> Path:
    return two_host_run(golden, tmp_path / "one")


@pytest.fixture
def parts(one: Path, tmp_path: Path) -> list[Path]:
    return split_run(one, tmp_path / "parts")


def answer(path: Path) -> Any:
    explained = explanation_json(stepscope.explain(path, cache=False))
    return strip(json.loads(json.dumps(explained, default=list)))


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "gathered.json")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_gathered_parts_are_explained_like_one_folder(
    one: Path, parts: list[Path], tmp_path: Path
) -> None:
    found = gather([str(part) for part in parts], tmp_path / "all")
    assert (found.ranks, found.world_size) == ((0, 1), 2)
    assert [(source.source, source.ranks) for source in found.sources] == [
        (str(parts[0]), (0,)),
        (str(parts[1]), (1,)),
    ]
    assert answer(tmp_path / "all") == answer(one)
    record = json.loads((tmp_path / "all" / "gathered.json").read_text())
    assert record["sources"] == [str(part) for part in parts]
    assert record["files"]["rank-00001/trace.json.gz"]["source"] == str(parts[1])


def test_a_second_call_copies_what_is_missing_or_has_changed(
    parts: list[Path], tmp_path: Path
) -> None:
    sources, out = [str(part) for part in parts], tmp_path / "all"
    first = gather(sources, out)
    before = contents(out)
    again = gather(sources, out)
    assert (again.copied.files, again.kept) == (0, first.copied)
    (out / "rank-00000" / "clock.json").unlink()
    steps = parts[1] / "rank-00001" / "steps.jsonl"
    rows = steps.read_text()
    steps.write_text(rows + rows.splitlines()[-1] + "\n")
    assert gather(sources, out).copied.files == 2
    assert contents(out)["rank-00001/steps.jsonl"] == steps.read_bytes()
    steps.write_text(rows)
    gather(sources, out)
    assert contents(out) == before


def test_a_host_that_comes_later_is_added(one: Path, parts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "all"
    assert gather([str(parts[0])], out).ranks == (0,)
    assert "rank 1" not in str(stepscope.explain(out, cache=False).verdict)
    assert gather([str(parts[1])], out).ranks == (0, 1)
    assert answer(out)["ranks"] == answer(one)["ranks"]
    assert answer(out)["run"] == answer(one)["run"]


def test_only_what_explain_reads_is_copied_unless_all_is_asked_for(
    parts: list[Path], tmp_path: Path
) -> None:
    shutil.copy(parts[0] / "rank-00000/trace.json.gz", parts[0] / "rank-00000/trace-stall.json.gz")
    (parts[0] / "report.html").write_text("x" * 1000)
    (parts[0] / "hosts" / "node0.processes.jsonl").write_text("{}\n")
    (parts[0] / "rank-00000" / ".steps.jsonl@node0.1.tmp").write_text("half")
    found = gather([str(part) for part in parts], tmp_path / "needed")
    assert found.left_out.files == 3
    everything = gather([str(part) for part in parts], tmp_path / "all", everything=True)
    assert everything.left_out.files == 0
    names = set(contents(tmp_path / "all")) - set(contents(tmp_path / "needed"))
    assert names == {
        "report.html",
        "rank-00000/trace-stall.json.gz",
        "hosts/node0.processes.jsonl",
    }


def test_of_several_windows_the_one_that_explain_takes_is_copied(
    parts: list[Path], tmp_path: Path
) -> None:
    for place, part in enumerate(parts):
        rank = part / f"rank-{place:05d}"
        shutil.copy(rank / "trace.json.gz", rank / "trace-step-00020.json.gz")
    explained = stepscope.explain([str(part) for part in parts], cache=False)
    chosen = {Path(rank.path).name for rank in explained.ranks}
    gather([str(part) for part in parts], tmp_path / "all")
    copied = {file.name for file in (tmp_path / "all").glob("rank-*/trace*")}
    assert copied == chosen


def test_a_folder_of_run_folders_and_a_glob_stand_for_all_of_them(
    parts: list[Path], tmp_path: Path
) -> None:
    assert gather([str(parts[0].parent)], tmp_path / "a").ranks == (0, 1)
    assert gather([str(parts[0].parent / "node*")], tmp_path / "b").ranks == (0, 1)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_the_same_rank_twice_is_fine_and_a_different_one_is_refused(
    one: Path, parts: list[Path], tmp_path: Path
) -> None:
    found = gather([str(one), str(parts[1])], tmp_path / "all")
    assert [note for note in found.notes if "rank 1" in note and "copied once" in note]
    assert answer(tmp_path / "all")["ranks"] == answer(one)["ranks"]
    change_rank(parts[1] / "rank-00001", pid=99)
    with pytest.raises(UsageError, match=r"rank 1 is in .* and in .*they differ") as caught:
        gather([str(one), str(parts[1])], tmp_path / "other")
    assert str(one) in str(caught.value)
    assert str(parts[1]) in str(caught.value)
    assert not (tmp_path / "other").exists()


def test_attempts_on_different_hosts_get_their_numbers(
    one: Path, parts: list[Path], tmp_path: Path
) -> None:
    shutil.rmtree(parts[1] / "rank-00001")
    second = parts[1] / "rank-00000"
    shutil.copytree(parts[0] / "rank-00000", second)
    rows = [json.loads(line) for line in (second / "steps.jsonl").read_text().splitlines()]
    for row in rows:
        row["end_unix_ns"] += 3_600_000_000_000
    (second / "steps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    began_ns = round(BEGAN_S[0] * 1e9)
    change_rank(parts[0] / "rank-00000", start_up={"began_unix_ns": began_ns})
    change_rank(second, host="node1", pid=5, start_up={"began_unix_ns": began_ns + 3600 * 10**9})
    gather([str(part) for part in reversed(parts)], tmp_path / "all")
    assert json.loads((tmp_path / "all/rank-00000.2/rank.json").read_text())["pid"] == 5


def test_other_jobs_and_other_folders_are_refused(
    golden: Path, parts: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "all"
    gather([str(parts[0])], out)
    other = tmp_path / "other"
    shutil.copytree(parts[1], other)
    change_host(other, 1, job="torchrun another")
    before = contents(out)
    with pytest.raises(UsageError, match="different jobs") as caught:
        gather([str(other)], out)
    assert "stepscope-gather" not in str(caught.value)  # the scratch folder
    assert contents(out) == before
    with pytest.raises(UsageError, match="not empty and was not gathered"):
        gather([str(parts[0])], parts[1])
    with pytest.raises(UsageError, match="is one of the sources"):
        gather([str(parts[0]), str(out)], out)
    with pytest.raises(UsageError, match="is a file"):
        gather([str(parts[0])], parts[1] / "run.json")


def test_sources_that_cannot_be_read_are_named(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="none does not exist"):
        gather([str(parts[0]), str(tmp_path / "none")], tmp_path / "all")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableInputError, match="holds no run folder"):
        gather([str(tmp_path / "empty")], tmp_path / "all")
    with pytest.raises(UnreadableInputError, match="no folder has such a name"):
        gather([str(tmp_path / "none-*")], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_what_fails_in_the_middle_leaves_whole_files_and_is_gone_on_with(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = FolderSource.fetch

    def fail(self: FolderSource, name: str, target: Path) -> None:
        fetch(self, name, target)
        if name.endswith("trace.json.gz"):
            target.write_bytes(target.read_bytes()[:100])

    monkeypatch.setattr(FolderSource, "fetch", fail)
    sources, out = [str(part) for part in parts], tmp_path / "all"
    with pytest.raises(UnreadableInputError, match="only 100 of"):
        gather(sources, out)
    assert not list(out.rglob("*.tmp"))
    assert not list(out.rglob("trace*"))
    monkeypatch.undo()
    found = gather(sources, out)
    assert found.copied.files == 2
    assert found.kept.files == len(contents(out)) - 3  # the traces and run.json are new


def test_a_kill_in_the_middle_leaves_nothing_half_named(parts: list[Path], tmp_path: Path) -> None:
    big = os.urandom(1 << 20)
    for name in (f"steps-{number:05d}.json.gz" for number in range(1, 200)):
        (parts[0] / "rank-00000" / name).write_bytes(big)
    out = tmp_path / "all"
    words = [sys.executable, "-m", "stepscope", "gather", *map(str, parts), "-o", str(out)]
    job = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    limit = time.monotonic() + 60
    while not list(out.glob("rank-*/steps-*")) and time.monotonic() < limit:
        time.sleep(0.01)
    job.send_signal(signal.SIGKILL)
    job.wait()
    for file in out.glob("rank-00000/steps-*"):
        assert file.read_bytes() == big
    gather([str(part) for part in parts], out)
    assert not list(out.rglob("*.tmp"))
    copied = contents(out)
    for part in parts:
        for name, content in contents(part).items():
            assert name == "run.json" or copied[name] == content


def test_the_verb_prints_what_it_did_and_what_is_missing(parts: list[Path], tmp_path: Path) -> None:
    runner = CliRunner()
    out = tmp_path / "all"
    done = runner.invoke(cli, ["gather", str(parts[0]), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "1 rank of 2 from 1 source" in done.output
    assert "missing   ranks 1" in done.output
    done = runner.invoke(cli, ["gather", *map(str, parts), "-o", str(out), "--json"])
    found = json.loads(done.output)
    assert (found["schema"], found["ranks"], found["world_size"]) == (1, [0, 1], 2)
    assert found["kept"]["files"] + found["copied"]["files"] == len(contents(out)) - 1


@pytest.fixture
def memory() -> Iterator[Any]:
    fsspec = pytest.importorskip("fsspec")
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def test_urls_of_fsspec_are_sources(
    one: Path, parts: list[Path], tmp_path: Path, memory: Any
) -> None:
    for part in parts:
        for name, content in contents(part).items():
            memory.pipe_file(f"/job/{part.name}/{name}", content)
    urls = [f"memory://job/{part.name}" for part in parts]
    found = gather(urls, tmp_path / "all")
    assert [source.source for source in found.sources] == urls
    assert answer(tmp_path / "all") == answer(one)
    assert gather(urls, tmp_path / "all").copied.files == 0
    assert gather(["memory://job/node*"], tmp_path / "glob").ranks == (0, 1)
    assert gather(["memory://job"], tmp_path / "folder").ranks == (0, 1)
    mixed = [parts[0].as_uri(), urls[1]]
    assert gather(mixed, tmp_path / "mixed").ranks == (0, 1)
    with pytest.raises(UnreadableInputError, match="memory://none does not exist"):
        gather(["memory://none"], tmp_path / "none")


def test_names_that_leave_the_folder_are_not_copied(
    parts: list[Path], tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in contents(parts[0]).items():
        memory.pipe_file(f"/job/{name}", content)
    find = type(memory).find

    def with_tricks(self: Any, *args: Any, **options: Any) -> Any:
        found = find(self, *args, **options)
        for name in ("../../escaped.json", "rank-00000/../../escaped.json", "hosts//x.json"):
            found[f"/job/{name}"] = {"name": f"/job/{name}", "size": 3, "type": "file"}
        return found

    monkeypatch.setattr(type(memory), "find", with_tricks)
    gather(["memory://job"], tmp_path / "inner" / "all", everything=True)
    assert not list(tmp_path.rglob("escaped.json"))


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[str]:
    """A server of our own on a free port, with our own keys: the start of its URLs."""
    pytest.importorskip("paramiko")
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None or os.getuid() != 0:
        pytest.skip("there is no sshd, or only root can start it")
    place = tmp_path / "ssh"
    place.mkdir(mode=0o700)
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)]
        subprocess.run(command, check=True)
    shutil.copy(place / "user.pub", place / "authorized")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "HostKey": place / "host",
        "AuthorizedKeysFile": place / "authorized",
        "PidFile": place / "pid",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "yes",
        "Subsystem": "sftp internal-sftp",
        "ListenAddress": f"127.0.0.1:{port}",
    }
    Path("/run/sshd").mkdir(exist_ok=True)
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    daemon = subprocess.Popen([server, "-D", "-f", "/dev/null", *flags])
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.05)
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    config = f"Host near\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {place / 'user'}\n"
    (home / ".ssh" / "config").write_text(config)
    before = os.environ.get("HOME", "")
    os.environ["HOME"] = str(home)
    yield "ssh://near"
    os.environ["HOME"] = before
    daemon.terminate()
    daemon.wait(timeout=10)


def test_hosts_are_sources_over_ssh(
    one: Path, parts: list[Path], tmp_path: Path, sshd: str
) -> None:
    urls = [f"{sshd}{part}" for part in parts]
    found = gather(urls, tmp_path / "all")
    assert [source.ranks for source in found.sources] == [(0,), (1,)]
    assert answer(tmp_path / "all") == answer(one)
    assert gather(urls, tmp_path / "all").copied.files == 0
    known = Path(os.environ["HOME"]) / ".ssh" / "known_hosts"
    assert len(known.read_text().splitlines()) == 1  # remembered the first time
    assert gather([f"{sshd}{parts[0].parent}/*"], tmp_path / "glob").ranks == (0, 1)
    with pytest.raises(UnreadableInputError, match="none does not exist"):
        gather([f"{sshd}{tmp_path}/none"], tmp_path / "none")
    with pytest.raises(UnreadableInputError, match="no host has this name"):
        gather(["ssh://no-such-host.invalid/x"], tmp_path / "none")


def test_a_host_with_another_key_than_before_is_refused(
    parts: list[Path], tmp_path: Path, sshd: str
) -> None:
    """paramiko reads ~/.ssh/known_hosts; there the host has a key of somebody else."""
    home = Path(os.environ["HOME"]) / ".ssh"
    port = (home / "config").read_text().split()[5]
    key = " ".join((tmp_path / "ssh" / "user.pub").read_text().split()[:2])
    (home / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}\n")
    with pytest.raises(UnreadableInputError, match=r"Host key .* does not match"):
        gather([f"{sshd}{parts[0]}"], tmp_path / "all")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.delitem(sys.modules, "stepscope.trace.ssh_files", raising=False)
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(UsageError, match=r"pip install 'stepscope\[ssh\]'"):
        gather(["ssh://host/run"], tmp_path / "all")
