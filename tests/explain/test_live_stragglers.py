"""Four real processes with a known fault: who is slow, and why.

Work is sleep, so the truth is known; a machine that is busy with other things can still make some
rank slow for a while, and then rightly says so. Each case therefore gets three tries.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stepscope import explain_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.records.job import Job

SCRIPT = Path(__file__).parent / "scripts/stragglers.py"
START = Path(__file__).parent / "scripts/start_ranks.py"
LAUNCH = Path(__file__).parent / "scripts/two_hosts.sh"
WINDOW = ("--wait", "5", "--warmup", "2", "--active", "6", "--no-explain")
TRIES = 3


def capture(out: Path, *arguments: str, launcher: tuple[str, ...] | None = None) -> Path:
    how = launcher or (sys.executable, str(START), "4")
    ours = (sys.executable, "-m", "stepscope", "run", "--out", str(out), *WINDOW, "--")
    done = subprocess.run(
        [*ours, *how, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return out


def explained(run: Path) -> Job:
    job = explain_job(run, cache=False).job
    assert job is not None
    return job


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without any fault."""
    return capture(tmp_path_factory.mktemp("healthy") / "run")


def verdict(job: Job) -> tuple[str, str | None, int | None]:
    stragglers = job.stragglers
    if not stragglers.ranks:
        return stragglers.verdict, None, None
    return stragglers.verdict, stragglers.ranks[0].cause, stragglers.ranks[0].rank


def said(
    tmp_path: Path,
    wanted: tuple[str, str | None, int | None],
    *arguments: str,
    first: Path | None = None,
) -> None:
    tries = []
    for number in range(TRIES):
        run = first if first and not number else capture(tmp_path / f"run{number}", *arguments)
        tries.append(verdict(explained(run)))
        if tries[-1] == wanted:
            return
    raise AssertionError(f"wanted {wanted}, got {tries}")


def test_a_rank_that_computes_longer(tmp_path: Path) -> None:
    said(tmp_path, ("found", "compute", 2), "--slow-compute", "2")


def test_a_rank_whose_data_comes_late(tmp_path: Path) -> None:
    said(tmp_path, ("found", "input", 1), "--slow-input", "1")


def test_nothing_wrong_accuses_nobody(tmp_path: Path, healthy: Path) -> None:
    said(tmp_path, ("none", None, None), first=healthy)


def test_an_offset_of_five_milliseconds_is_found(tmp_path: Path, healthy: Path) -> None:
    """All ranks run on this machine's one clock, so the whole offset is ours."""
    run = tmp_path / "run"
    shutil.copytree(healthy, run)
    shift(run / "rank-00003", 5_000_000)
    job = explained(run)
    assert explained(healthy).clock.aligned
    assert job.clock.aligned
    for rank, offset_ns in {1: 0, 2: 0, 3: 5_000_000}.items():
        assert abs(job.clock.offset_ns[rank] - offset_ns) < 100_000
        assert abs(job.clock.offset_ns[rank] - offset_ns) <= job.clock.error_ns[rank]


def shift(folder: Path, by_ns: int) -> None:
    """As if this rank's clock had been ahead all along."""
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    trace["baseTimeNanoseconds"] += by_ns
    (folder / "trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    clock = json.loads((folder / "clock.json").read_text())
    for sync in clock["syncs"]:
        sync["rounds"] = [[came + by_ns, left + by_ns] for came, left in sync["rounds"]]
    (folder / "clock.json").write_text(json.dumps(clock))
    lines = [json.loads(line) for line in (folder / "comms.jsonl").read_text().splitlines()]
    shifted = [{**line, "created_ns": line["created_ns"] + by_ns} for line in lines]
    (folder / "comms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in shifted))


# A slow link, between two network namespaces that stand for two hosts.


def _network(*commands: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-ec", "\n".join(commands)], capture_output=True, text=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs ip and tc (iproute2)")
    names = f"ssa{os.getpid()}", f"ssb{os.getpid()}"
    a, b = names
    made = _network(
        f"ip netns add {a}",
        f"ip netns add {b}",
        f"ip link add {a} netns {a} type veth peer name {b} netns {b}",
        f"ip -n {a} addr add 10.77.0.1/24 dev {a}",
        f"ip -n {b} addr add 10.77.0.2/24 dev {b}",
        *(f"ip -n {name} link set lo up; ip -n {name} link set {name} up" for name in names),
        f"tc -n {b} qdisc add dev {b} root tbf rate 10gbit burst 1mb latency 50ms",
        f"tc -n {b} qdisc del dev {b} root",
    )
    try:
        if made.returncode:
            pytest.skip(f"no network namespaces or token buckets here: {made.stderr.strip()}")
        yield names
    finally:
        _network(f"ip netns del {a} || true", f"ip netns del {b} || true")


def test_a_slow_link_between_two_hosts(
    tmp_path: Path, two_hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_PROFILES", str(tmp_path / "profiles"))
    launcher = ("bash", str(LAUNCH), sys.executable, *two_hosts)
    quickly = ("--quick", "--kind", "all_reduce", "--seconds", "0.5")
    calibrated = subprocess.run(
        [*launcher, "-m", "stepscope", "calibrate", *quickly],
        capture_output=True,
        text=True,
    )
    assert calibrated.returncode == 0, calibrated.stderr
    far = two_hosts[1]
    bucket = "tbf rate 100mbit burst 256kb latency 1s"
    slowed = _network(f"tc -n {far} qdisc add dev {far} root {bucket}")
    assert slowed.returncode == 0, slowed.stderr
    found = explained(capture(tmp_path / "run", "--steps", "15", launcher=launcher))
    assert verdict(found) == ("found", "link", None)
    assert found.stragglers.ranks[0].slowdown > 1.5
